"""Runs `make bench-peers ARGS='…'`: measures dynamo-vllm and every peer on this machine.

Each peer is started once, one after the other, and stays up; an idle server uses no CPU, and one that does is
stopped between its turns. Rounds alternate the order. Prompts are the same for all in a round, new in each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peers import cold, machine, page
from peers.contestants import BARE, Starter, titles
from peers.environments import BENCH, ROOT, Environments
from peers.match import Match, Record, say
from peers.settings import Stage, cpu_setting

PAGE = ROOT / "docs" / "performance.md"
DEFAULT_PEERS = (BARE, "vllm", "vllm-rust", "upstream", "upstream-kv", "sglang", "ours")
REQUESTS = {1: 24, 8: 64, 32: 192}
QUICK_REQUESTS = {1: 8, 8: 24, 32: 64}


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped on the way out
    path = options.show or measure(options, argv)
    found = json.loads(path.read_bytes())
    print(f"\n{page.text(found)}\n\n{path}", flush=True)
    if options.write:
        page.write(PAGE, "peers", page.markdown(found))
        say(f"written: {PAGE.relative_to(ROOT)}")
    return 0


def measure(options: argparse.Namespace, argv: Sequence[str]) -> Path:
    """Run everything; return the file with the result."""
    began, stamp = time.monotonic(), time.strftime("%Y%m%d-%H%M%S")
    setting = cpu_setting(BENCH / "models", stages(options.stages, options.quick))
    command = f"make bench-peers ARGS='{' '.join(argv)}'" if argv else "make bench-peers"
    record = Record(BENCH / "results" / f"peers-{stamp}.json", command, machine.facts(), setting.facts())
    folder = BENCH / "run" / stamp
    environments = Environments()
    if options.rounds:
        starter = Starter(setting, environments, folder, options.clients)
        with Match(starter, record) as match:
            match.bring_up(options.peers)
            match.play(options.rounds)
    if options.cold:
        cold.play(setting, environments, folder, options.cold, record)
    record.save()
    say(f"measured in {time.monotonic() - began:.0f} s")
    if not options.keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
    return record.path


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = ", ".join(titles())
    parser.add_argument("--peers", type=names, default=list(DEFAULT_PEERS), help=f"comma list of: {listed}")
    parser.add_argument("--rounds", type=int, help="default 6, with --quick 2; 0 leaves the load out")
    parser.add_argument(
        "--stages", type=numbers, default=[1, 8, 32], help="requests in flight (default 1,8,32)"
    )
    parser.add_argument("--quick", action="store_true", help="few requests, two rounds, no cold start")
    parser.add_argument("--cold", type=int, help="cold starts of each command (default 3, with --quick 0)")
    parser.add_argument("--clients", type=int, help="client processes of the load")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/performance.md")
    parser.add_argument("--keep-logs", action="store_true", help="keep the servers' logs under .bench/run")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, show an earlier result")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = 2 if options.quick else 6
    if options.cold is None:
        options.cold = 0 if options.quick else 3
    return options


def names(text: str) -> list[str]:
    found = [name for name in text.split(",") if name]
    if unknown := [name for name in found if name not in titles()]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is no peer; known are {', '.join(titles())}")
    return found


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def stages(concurrencies: Sequence[int], quick: bool) -> tuple[Stage, ...]:
    known = QUICK_REQUESTS if quick else REQUESTS
    return tuple(Stage(c, known.get(c, (2 if quick else 6) * c)) for c in concurrencies)
