"""Ours beside every peer on a GPU host, where all is importable in this interpreter and nothing is installed.

    python scripts/gpu/bench.py tiny|8b [--peers ours,vllm] [--rounds 2] [--out FOLDER] [--profile SECONDS]
    python scripts/gpu/bench.py report FILE … [--write]

`tiny` is the tiny model at 256 and 1 requests in flight, 128 tokens in and out; `8b` a model of 8B shape with
dummy weights at 128 and 1, 512 in and 128 out. A run writes FOLDER/bench-STEP.json after every measurement:
one that is cut short keeps what it has; `report` puts the files of several runs together. `--device cpu`
rehearses the same steps with small models where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from peers import machine, page
from peers.contestants import Starter
from peers.environments import ROOT, Environments
from peers.match import Match, Record
from peers.profile import profile
from peers.run import names
from peers.settings import Setting, Stage, gpu_setting, rehearsal

PEERS = ("vllm", "vllm-rust", "upstream", "ours")
STAGES = {
    "tiny": (Stage(256, 1024, 128, 128), Stage(1, 24, 128, 128)),
    "8b": (Stage(128, 384, 512, 128), Stage(1, 16, 512, 128)),
}
REHEARSED = {
    "tiny": (Stage(8, 16, 128, 16), Stage(1, 4, 128, 16)),
    "8b": (Stage(4, 8, 512, 16), Stage(1, 4, 512, 16)),
}
STEPS = tuple(STAGES)


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped on the way out
    options = parse(argv)
    if options.step == "report":
        return report(options.files, options.write)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        setting = choose(options, Path(folder))
        path, command = options.out / f"bench-{options.step}.json", f"scripts/gpu/bench.py {options.step}"
        record = Record(path, f"python {command}", machine.facts(), setting.facts())
        record.save()
        starter = Starter(setting, Environments(this_interpreter_only=True), Path(folder), options.clients)
        try:
            with Match(starter, record, time.monotonic() + options.limit) as match:
                match.bring_up(options.peers, options.together)
                match.play(options.rounds)
                if options.profile:
                    for name in options.profile_peers:
                        if up := match.contestant(name):
                            profile(up, setting.stages[0], options.profile, options.out)
        finally:
            print(f"\n{page.text(vars(record))}\n", flush=True)
            save_logs(Path(folder), options.out, record)
    return 0


def choose(options: argparse.Namespace, folder: Path) -> Setting:
    known = REHEARSED if options.device == "cpu" else STAGES
    stages = [s for s in known[options.step] if not options.stages or s.concurrency in options.stages]
    make = rehearsal if options.device == "cpu" else gpu_setting
    setting = make(options.step, folder, tuple(stages))
    if options.device == "cuda" and importlib.util.find_spec("flashinfer") is None:
        setting.variables["VLLM_USE_FLASHINFER_SAMPLER"] = (
            "0"  # vLLM 0.30 wants it by default and fails without
        )
    return setting


def save_logs(folder: Path, out: Path, record: Record) -> None:
    """The logs of peers that did not start, in one file: a host that is gone tells nothing more."""
    lines: list[str] = []
    for name in record.missing:
        for log in sorted((folder / name).glob("*.log")):
            lines += [f"==> {name}/{log.name}", *log.read_text(errors="replace").splitlines()[-200:]]
    if lines:
        (out / f"failed-{record.setting['name']}.log").write_text("\n".join(lines) + "\n")


def report(files: Sequence[Path], write: bool) -> int:
    """The tables of all files, those of one setting together; their rounds are counted on."""
    merged: dict[str, dict[str, Any]] = {}
    for path in files:
        merge(merged, json.loads(path.read_bytes()))
    for name, record in merged.items():
        print(f"== {name}\n{page.text(record)}\n")
        if write:
            page.write(ROOT / "docs" / "performance.md", f"gpu-{name}", page.markdown(record))
    return 0


def merge(merged: dict[str, dict[str, Any]], record: dict[str, Any]) -> None:
    name = record["setting"]["name"]
    if name not in merged:
        merged[name] = record
        return
    kept = merged[name]
    after = 1 + max((row["round"] for row in kept["rows"]), default=-1)
    kept["rows"] += [row | {"round": row["round"] + after} for row in record["rows"]]
    kept["peers"] |= record["peers"]
    kept["answers"] |= record["answers"]
    kept["cold"] += record["cold"]
    missing = kept["missing"] | record["missing"]
    kept["missing"] = {name: why for name, why in missing.items() if name not in kept["peers"]}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=(*STEPS, "report"))
    parser.add_argument("files", nargs="*", type=Path, help="with report: the files of earlier runs")
    parser.add_argument("--peers", type=names, default=list(PEERS), help=f"default {','.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--together", action="store_true", help="start all servers at once: faster, the starts are no measure"
    )
    parser.add_argument("--stages", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the results (default: here)")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no turn begins")
    parser.add_argument("--clients", type=int, default=4, help="client processes of the load")
    parser.add_argument("--profile", type=int, default=0, metavar="SECONDS", help="py-spy after the rounds")
    parser.add_argument("--profile-peers", type=names, default=["ours"], help="default ours")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", action="store_true", help="with report: into docs/performance.md")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
