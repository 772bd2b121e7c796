"""Runs the given test tiers and prints the time of each; a tier without tests does not fail.

Without names it runs all tiers but their tests marked `more`, and with `more` as the only name just these.
Further arguments for pytest come from PYTEST_ARGS. Tests marked `long` run only when these ask for them.
Without such arguments, the only test of a tier that fails runs once more, alone; the last lines name what
passed only then (scripts/rerun.py). Without names of tiers, too, suites whose inputs have not changed since
they passed do not run (scripts/unchanged.py).

The seconds of each test and fixture go into build/durations/TIER.json; with `--durations` in PYTEST_ARGS the
slowest of all these tiers are printed.
"""

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

import durations
import machine
import rerun
import unchanged

MORE = "more"
"""The mark of tests that CI runs after the others, so that all tiers take less than half an hour."""
TIERS = ("unit", "runtime", "contract", "cpu", "e2e", "bare", "deploy", "console")
TWO = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
AT_ONCE = {"runtime": TWO, "cpu": TWO, "e2e": TWO, "bare": TWO, "deploy": ("-n", "auto"), "console": TWO}
"""Much of the time is waiting, and an engine computes with one thread. The tests of a file share what it
starts. The slowest file is first, so that none runs alone at the end."""
DEPLOYING = {"runtime", "cpu", "e2e", "bare", "console"}
"""Tiers that start whole deployments, and so need much of the machine."""
IN_PARTS = {"unit": 2}
"""Tiers of thousands of short tests, of whose time pytest-xdist takes a quarter for itself: a few plain
pytests run instead, each with files of its own. So many for each core, because tests wait, too."""
MOST_PARTS = 8
SECONDS_PER_BYTE = 40e-6
"""Of files that are not slow enough for tests/seconds.json."""
BESIDE = {"contract": ("packages/omni-cpu/tests",)}
"""The packages of this repository that have their own tests."""
ROOT = Path(__file__).resolve().parent.parent
SECONDS: dict[str, float] = json.loads((ROOT / "tests" / "seconds.json").read_text())
SLOWEST = 40
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 2 << 30


def main(names: list[str]) -> int:
    tiers, marks = ((), MORE) if names == [MORE] else (names, None if names else f"not {MORE}")
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown:
        print(f"no tier called {', '.join(unknown)}; there are {', '.join(TIERS)}", file=sys.stderr)
        return 2
    arguments, shows_durations = arguments_for_pytest(os.environ.get("PYTEST_ARGS", ""))
    if not names and not arguments and (refused := rerun.to_mend()):
        print(*(f"error: tests/retried.toml: {line}" for line in refused), sep="\n", file=sys.stderr)
        return 2
    try:
        scarce = machine.warnings() if DEPLOYING.intersection(tiers or TIERS) else ()
    except machine.TooFew as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    for warning in scarce:
        print(f"warning: {warning}", file=sys.stderr)
    suites = unchanged.Choice()
    if not arguments:
        runs = ("test", "more") if tiers else (names or ["test"])
        suites = unchanged.choose(runs, unchanged.this_machine(), is_complete=bool(tiers))
    rows = [run_tier(tier, marks, arguments, suites.left_out(tier)) for tier in tiers or TIERS]
    passed = {tier for tier, _, result in rows if result == "passed"}
    ran = files_that_ran(tiers or TIERS)
    for suite in suites.changed:
        if suites.tiers(suite) <= passed and {*suites.tests[suite]} <= ran:
            suites.passed(suite)
    if shows_durations:
        by_tier = {tier: durations.read(durations_of(tier)) for tier, _, _ in rows}
        print("\n" + durations.table(by_tier, SLOWEST))
    print("\n" + "\n".join(f"{tier:<10}{seconds:7.1f} s  {result}" for tier, seconds, result in rows))
    for suite, since in suites.unchanged.items():
        print(f"{suite}: {since}")
    if any(result.startswith(rerun.ALONE) for _, _, result in rows):
        print("write into tests/retried.toml why it passed only when run alone, and commit that")
    return int(any(result.startswith("FAILED") for _, _, result in rows))


def arguments_for_pytest(text: str) -> tuple[list[str], bool]:
    """Return these arguments without our `--durations`, and whether it was there; pytest's has a number."""
    arguments = shlex.split(text)
    for index, argument in enumerate(arguments):
        if argument == "--durations" and not "".join(arguments[index + 1 : index + 2]).isdecimal():
            return [*arguments[:index], *arguments[index + 1 :]], True
    return arguments, False


def files_that_ran(tiers: Sequence[str]) -> set[str]:
    """Return the test files of which not every test was skipped."""
    tests = (durations.read(durations_of(tier)).tests for tier in tiers)
    return {node.partition("::")[0] for one in tests for node, phases in one.items() if "call" in phases}


def durations_of(tier: str) -> Path:
    return ROOT / "build" / "durations" / f"{tier}.json"


def run_tier(
    tier: str, marks: str | None, asked: Sequence[str], left_out: Sequence[Path]
) -> tuple[str, float, str]:
    durations_of(tier).unlink(missing_ok=True)
    folder = ROOT / "tests" / tier
    if not folder.is_dir():
        return tier, 0.0, "no tests"
    print(f"\n== {tier} ==", flush=True)
    began = time.monotonic()
    chosen = () if "-m" in asked else ("-m", f"not long and {marks}" if marks else "not long")
    folders = [folder, *(ROOT / path for path in BESIDE.get(tier, ()))]
    tries = 1 if asked else 2
    files = slowest_first({path for folder in folders for path in folder.rglob("test_*.py")} - {*left_out})
    if not files:
        return tier, 0.0, "no tests"
    if tier in IN_PARTS:
        count = min(IN_PARTS[tier] * (os.cpu_count() or 1), MOST_PARTS)
        result = run_parts(parts(files, count), [*chosen, *asked], tries, durations_of(tier))
    else:
        once = functools.partial(run_pytest, files)
        cache = ROOT / ".pytest_cache" / tier
        first = (*AT_ONCE.get(tier, ()), durations.OPTION, str(durations_of(tier)))
        result = rerun.run(once, first, [*chosen, *asked], cache, tries)
    return tier, time.monotonic() - began, result


def run_pytest(paths: Sequence[Path], arguments: Sequence[str]) -> int:
    return subprocess.run(pytest(paths, arguments), cwd=ROOT, env=environment()).returncode


def slowest_first(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda path: (-seconds_of(path), path))


def parts(files: Iterable[Path], count: int) -> list[list[Path]]:
    """Divide test files into lists that take about the same time, the same in each run: each file, the
    slowest first, goes to the list with the least time."""
    found: list[tuple[float, list[Path]]] = [(0.0, []) for _ in range(count)]
    for path in slowest_first(files):
        least = min(range(count), key=lambda number: found[number][0])
        taken, paths = found[least]
        found[least] = (taken + seconds_of(path), [*paths, path])
    return [sorted(paths) for _, paths in found if paths]


def seconds_of(path: Path) -> float:
    return SECONDS.get(os.path.relpath(path, ROOT), path.stat().st_size * SECONDS_PER_BYTE)


def run_parts(
    parts: Sequence[Sequence[Path]], arguments: Sequence[str], tries: int, durations_to: Path
) -> str:
    """Run one pytest for each list and return the result; all output but the first's comes at the end."""
    # A cache each, or `--lf` would know the failures of one of them only.
    caches = [ROOT / ".pytest_cache" / f"part-{number}" for number in range(1, len(parts) + 1)]
    each = [["-o", f"cache_dir={cache}", *arguments] for cache in caches]
    durations_of_parts = [durations_to.with_suffix(f".{number}.json") for number in range(1, len(parts) + 1)]
    for cache in caches if tries > 1 else ():
        rerun.file_of_failures(cache).unlink(missing_ok=True)
    with ExitStack() as open_files:
        outputs = [None, *(open_files.enter_context(TemporaryFile()) for _ in parts[1:])]
        processes = [
            subprocess.Popen(
                pytest(paths, [durations.OPTION, str(path), *own]),
                cwd=ROOT,
                env=environment() | temporary_folder(MEMORY),
                stdout=output,
                stderr=output and subprocess.STDOUT,
            )
            for paths, path, own, output in zip(parts, durations_of_parts, each, outputs, strict=True)
        ]
        codes = []
        for process, output in zip(processes, outputs, strict=True):
            codes.append(process.wait())
            if output is not None:
                output.seek(0)
                print(output.read().decode(errors="replace"), end="", flush=True)
    durations.merge(durations_of_parts, durations_to)
    if tries == 1:
        return rerun.result_of(codes)
    again = [
        functools.partial(run_pytest, paths, ["--last-failed", *own])
        for paths, own in zip(parts, each, strict=True)
    ]
    return rerun.after(codes, caches, again)


def pytest(paths: Sequence[Path], arguments: Sequence[str]) -> list[str]:
    return [sys.executable, durations.__file__, *map(str, paths), *arguments]


def environment() -> dict[str, str]:
    """Return the variables with bytecode allowed, so that not every process compiles the package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def temporary_folder(memory: Path) -> dict[str, str]:
    """Return pytest's variable for it: folders in memory, if there is room, wait for no disk."""
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= MEMORY_BYTES
    return {"PYTEST_DEBUG_TEMPROOT": str(memory)} if has_room else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
