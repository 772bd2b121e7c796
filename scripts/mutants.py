"""Puts one-line faults into copies of the last commit, and reports which of them the tests notice.

    python scripts/mutants.py list --seed 7 > faults.json
    python scripts/mutants.py run --faults faults.json --out results.json
    python scripts/mutants.py run --faults faults.json --out results.json --pytest '-m more' tests/cpu

`list` chooses the faults: spread over the rooms by their lines, and over the kinds. A fault names its
function and line by their text, so that it fits later versions. `run` puts each in alone, for the unit tests
of its module and then of its room; those that survive all at once, for one folder or file of tests after the
other. Tests that fail run again with either half of the faults, until one is left, and then without it: what
fails there, too, says nothing. A further call with the same files continues with the survivors.
"""

import argparse
import functools
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rerun
from fault_sites import KINDS, SRC, Fault, choose, faulty, is_python, room_of

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("-m", "not long and not more")
ALONE = "unit tests of its room"
GONE = "no longer there"
FEW = 8  # tests that tell faults apart before all that failed do
TIERS = ("unit", "deploy", "contract", "runtime", "cpu", "e2e", "bare", "console")


def prepare(tree: Path) -> None:
    """Check out the last commit, with an environment of its own."""
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, tree], check=True)
    subprocess.run(["git", "-C", tree, "fetch", "--quiet", "origin", "HEAD"], check=True)
    subprocess.run(["git", "-C", tree, "checkout", "--quiet", "--force", "FETCH_HEAD"], check=True)
    subprocess.run(["make", "--silent", "-C", tree, "venv-dev"], check=True)
    subprocess.run([tree / ".venv/bin/python", "-m", "compileall", "-q", tree / "src"], check=True)
    (tree / "build").mkdir(exist_ok=True)  # for the log


@contextmanager
def put_in(tree: Path, faults: Sequence[Fault]) -> Iterator[None]:
    originals = {tree / fault.file: (tree / fault.file).read_text() for fault in faults}
    times = {path: path.stat().st_mtime_ns for path in originals}
    try:
        for path, source in originals.items():
            path.write_text(faulty(source, [fault for fault in faults if tree / fault.file == path]))
        yield
    finally:
        for path, source in originals.items():
            path.write_text(source)
            os.utime(path, ns=(times[path], times[path]))  # its compiled file stays valid


def failures(
    tree: Path, options: Sequence[str], seconds: float, faults: Sequence[Fault], tests: Sequence[str]
) -> list[str]:
    """Return which tests fail with these faults; all, if they do not end in time or pytest breaks."""
    last_failed = rerun.file_of_failures(tree / ".pytest_cache" / "mutants")
    last_failed.unlink(missing_ok=True)
    cache = ["-o", f"cache_dir={tree}/.pytest_cache/mutants"]
    command = [f"{tree}/.venv/bin/python", "-m", "pytest", "-q", *cache, *options, *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    with put_in(tree, faults), (tree / "build/mutants.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        code = end(process, seconds)
    if code in (0, rerun.NO_TESTS):
        return []
    return sorted(json.loads(last_failed.read_text())) if last_failed.exists() else list(tests)


def end(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return its status; after these seconds it may end what it started, for half a minute."""
    for signal_number, wait in ((signal.SIGINT, seconds), (signal.SIGKILL, 30)):
        try:
            return process.wait(wait)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal_number)
    return process.wait()


Run = Callable[[Sequence[Fault], Sequence[str]], list[str]]


def noticed(run: Run, faults: Sequence[Fault], tests: Sequence[str]) -> dict[Fault, str]:
    """Return the faults with which a test fails each time, while it passes without."""
    failed = run(faults, tests) if faults else []
    if not failed:
        return {}
    if len(faults) == 1:
        failed = run(faults, failed)
        without = run([], failed) if failed else []
        real = [test for test in failed if test not in without]
        return dict.fromkeys(faults, real[0]) if real else {}
    half = len(faults) // 2
    some = failed[:: len(failed) // FEW + 1]
    tests_by_fault = noticed(run, faults[:half], some) | noticed(run, faults[half:], some)
    if len(some) == len(failed):
        return tests_by_fault
    if not tests_by_fault:
        return noticed(run, faults[:half], failed) | noticed(run, faults[half:], failed)
    return tests_by_fault | noticed(run, [f for f in faults if f not in tests_by_fault], failed)


def nearest(tree: Path, file: str) -> list[list[str]]:
    """Return the unit tests of a module, then those of its room, as far as there are any."""
    room = tree / "tests/unit" / room_of(file)
    module = (tree / "tests/unit" / Path(file).relative_to(SRC)).with_suffix("")
    own = [*module.parent.glob(f"test_{module.name}*.py"), *(path for path in [module] if path.is_dir())]
    whole = [room] if room_of(file) != "." else list(room.glob("test_*.py"))
    folder = [module.parent] if module.parent.is_dir() and module.parent not in whole and not own else own
    steps = [[str(path.relative_to(tree)) for path in paths if path.exists()] for paths in (folder, whole)]
    return [paths for paths in steps if paths]


class Results:
    """What was noticed, in a file that a further call reads."""

    def __init__(self, faults: Sequence[Fault], path: Path) -> None:
        self._path = path
        earlier = json.loads(path.read_text()) if path.exists() else []
        self.records: dict[Fault, dict[str, Any]] = {fault: {"survived": []} for fault in faults}
        self.records |= {Fault(**record["fault"]): record for record in earlier}

    def open(self, stage: str) -> list[Fault]:
        """Return the faults that no stage has decided, and that this one has not seen."""
        records = self.records.items()
        return [f for f, record in records if "stage" not in record and stage not in record["survived"]]

    def add(self, stage: str, faults: Sequence[Fault], tests: dict[Fault, str], seconds: float) -> None:
        print(f"{seconds:8.1f} s  {stage}: {len(faults) - len(tests)} of {len(faults)} survive", flush=True)
        for fault in faults:
            if fault in tests:
                self.records[fault] |= {"stage": stage, "test": tests[fault], "seconds": round(seconds, 1)}
                print(f"            {fault.file}: {fault.new}  {tests[fault]}", flush=True)
            else:
                self.records[fault]["survived"].append(stage)
        content = [{"fault": asdict(fault)} | record for fault, record in self.records.items()]
        self._path.write_text(json.dumps(content, indent=1) + "\n")

    def table(self) -> str:
        records = self.records.items()
        lines = []
        for kind in KINDS:
            stages = Counter(r.get("stage", "survives") for fault, r in records if fault.kind == kind)
            lines.append(f"{kind:<10}" + ", ".join(f"{stage} {n}" for stage, n in sorted(stages.items())))
        survivors = (f for f, record in records if record.get("stage", GONE) == GONE)
        return "\n".join([*lines, *(f"{f.file} {f.function}: {f.line}  ->  {f.new}" for f in survivors)])


def run_all(arguments: argparse.Namespace) -> None:
    faults = [Fault(**fault) for fault in json.loads(arguments.faults.read_text())]
    results = Results(faults, arguments.out)
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(arguments.trees):
        prepare(arguments.folder / str(number))
        trees.put(arguments.folder / str(number))

    for fault in results.open(ALONE):
        if not fits(trees.queue[0], fault):
            results.records[fault]["stage"] = GONE

    def run_alone(fault: Fault) -> tuple[dict[Fault, str], float]:
        tree, began = trees.get(), time.monotonic()
        run = functools.partial(failures, tree, ["-x", "--timeout=90", *MARKS], arguments.seconds)
        tests: dict[Fault, str] = {}
        for paths in nearest(tree, fault.file):
            tests = tests or noticed(run, [fault], paths)
        trees.put(tree)
        return tests, time.monotonic() - began

    with ThreadPoolExecutor(arguments.trees) as pool:
        faults = results.open(ALONE)
        for fault, (tests, seconds) in zip(faults, pool.map(run_alone, faults), strict=True):
            results.add(ALONE, [fault], tests, seconds)
    for path in arguments.tests or [f"tests/{tier}" for tier in TIERS]:
        stage, began = " ".join([path, *arguments.pytest]), time.monotonic()
        if faults := results.open(stage):
            run = functools.partial(failures, trees.queue[0], [*MARKS, *arguments.pytest], arguments.seconds)
            tests = noticed(run, faults, [path])
            results.add(stage, faults, tests, time.monotonic() - began)
    print(results.table())


def fits(tree: Path, fault: Fault) -> bool:
    try:
        return is_python(faulty((tree / fault.file).read_text(), [fault]))
    except (FileNotFoundError, IndexError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="choose faults and print them as JSON")
    listing.add_argument("--seed", type=int, required=True)
    listing.add_argument("--count", type=int, default=60)
    listing.add_argument("--skip", type=Path, help="faults that change nothing, as this prints them")
    running = commands.add_parser("run", help="put them in and run tests; needs minutes to hours")
    running.add_argument("--faults", type=Path, required=True, help="what `list` printed")
    running.add_argument("--out", type=Path, required=True, help="the file of results")
    running.add_argument("--folder", type=Path, default=ROOT / "build/mutants", help="where the copies are")
    running.add_argument("--trees", type=int, default=2, help="how many copies are used at once")
    running.add_argument("--seconds", type=float, default=3600, help="the most for one call of pytest")
    running.add_argument("--pytest", type=shlex.split, default=[], help="more arguments: '-n 2 -m more'")
    running.add_argument("tests", nargs="*", help="folders and files for survivors; all tiers without any")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run_all(arguments)
    skip = json.loads(arguments.skip.read_text()) if arguments.skip else []
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / SRC).rglob("*.py")}
    faults = choose(sources, arguments.count, arguments.seed, [Fault(**fault) for fault in skip])
    json.dump([asdict(fault) for fault in faults], sys.stdout, indent=1)


if __name__ == "__main__":
    main()
