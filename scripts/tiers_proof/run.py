"""Runs cases with tiers, prints a line for each, and ends with 1 if one is wrong or shows nothing."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.warm import zygote
from tiers_proof import page, rows, tiers
from tiers_proof.cases import BROKEN_ON_GPU, BY_NAME, CASES, FIRST_ON_GPU
from tiers_proof.proof import Proof

Work = tuple[str, Sequence[str]]
"""A case and tiers, one after the other."""


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    table = rows.new_table(options.device)
    with tempfile.TemporaryDirectory(prefix="tiers-proof-") as name:
        folder = (options.logs or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        _make_plugin_known(folder / "installed")
        with zygote(folder) as warm, ThreadPoolExecutor(options.jobs) as threads:
            proof = Proof(warm, folder, options.device, ends=time.monotonic() + 60 * options.minutes)

            def run(work: Work) -> None:
                for tier in work[1]:
                    row = proof.row(BY_NAME[work[0]], tier)
                    table.add(row, options.json)
                    print(row.text(), flush=True)

            for _ in threads.map(run, _works(options)):
                pass
    if options.page:
        print(page.page([table]))
    return 0 if all(row.is_good for row in table.rows) else 1


def _make_plugin_known(folder: Path) -> None:
    """Writes our package's metadata if it is not installed: vLLM's processes find our patches by them."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("dynamo-vllm")
        return
    info = folder / "dynamo_vllm-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dynamo-vllm\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndynamo_vllm = dynamo_vllm.engine.patches.plugin:register\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])


def _works(options: Any) -> list[Work]:
    on_gpu = options.device == "cuda"
    names = options.only or (list(dict.fromkeys([*FIRST_ON_GPU, *CASES])) if on_gpu else list(CASES))
    chosen = [BY_NAME[name] for name in names if options.device in BY_NAME[name].devices]
    each = options.tier or (["host", "disk"] if on_gpu else ["late-host", "late-disk"])
    works = [
        (case.name, [tier for tier in each if tier in tiers.ON_DISK or not case.is_for_disk])
        for case in chosen
    ]
    if on_gpu and not options.tier:
        works += [(case.name, ["broken:next-block"]) for case in chosen if case.name in BROKEN_ON_GPU]
    return [(case, found) for case, found in works if found]


def _options(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(
        prog="python scripts/tiers_proof", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--only", nargs="*", metavar="CASE", help=f"of: {', '.join(BY_NAME)}")
    add("--tier", nargs="*", metavar="TIER", help=f"of: {', '.join(tiers.TIERS)}")
    add("--device", choices=("cpu", "cuda"), default=None, help="default: what vLLM is built for")
    add("--jobs", type=int, default=1, metavar="N", help="cases at once (default: %(default)s)")
    add("--minutes", type=float, default=math.inf, metavar="N", help="start no engine after that")
    add("--json", type=Path, metavar="FILE", help="write all rows there, after each one")
    add("--page", action="store_true", help="print a table in Markdown at the end")
    add("--logs", type=Path, metavar="FOLDER", help="keep the logs of engines with a bad outcome there")
    options = parser.parse_args(argv)
    if options.device is None:
        from dynamo_vllm.engine.machine import device

        options.device = device()
    if unknown := [name for name in options.only or () if name not in BY_NAME]:
        parser.error(f"unknown case {unknown[0]!r}")
    return options
