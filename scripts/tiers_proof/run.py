"""Runs cases with tiers, prints a line for each, and ends with 1 if one is wrong or shows nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu import guessing
from harness.adapters import make_adapter
from harness.warm import Zygote, zygote
from tiers_proof import children, models, page, tiers
from tiers_proof.case import TOLERANCES, Case
from tiers_proof.cases import BY_NAME, CASES
from tiers_proof.compare import Outcome, compare

MANY_BLOCKS = 1024
"""The cache of an engine without tiers: everything fits."""
REFUSALS = ("KV tiers:", "not currently supported with KV connectors")
"""Words of errors that refuse tiers: our own, and vLLM's."""


class NoEngine(Exception):
    """vLLM cannot run this case on this machine, without tiers either."""


@dataclass
class Row:
    """One line of the table."""

    case: str
    tier: str
    verdict: str
    seconds: float
    outcome: Outcome | None = None
    reason: str = ""

    def text(self) -> str:
        head = f"{self.case:16} {self.tier:14} {self.seconds:6.1f} s  {self.verdict:9}"
        found = self.outcome
        if found is None:
            return f"{head} {self.reason}"
        told = f"{found.requests} answers, {found.loaded} tokens loaded {found.sources or ''}"
        told += f", {found.preemptions} preempted, largest difference {found.worst:.1e}, {found.ties} ties"
        return "; ".join([f"{head} {told}", *found.wrong[:2], *found.empty[:2]])


@dataclass
class Proof:
    """Runs cases on one machine."""

    warm: Zygote
    folder: Path
    device: str
    wanted: dict[tuple[str, int], Any] = field(default_factory=dict)
    """The answers without tiers, by case and life."""
    runs: int = 0
    keeps: bool = False
    """Whether to keep the files of all engines."""

    def row(self, case: Case, tier: str) -> Row:
        began = time.monotonic()
        verdict, outcome, reason = "FAILED", None, ""
        try:
            outcome = self._prove(case, tier)
            verdict = outcome.verdict
        except NoEngine as exc:
            verdict, reason = "no engine", str(exc)
        except children.Failed as exc:
            reason = str(exc)
            if self.device in case.refused_on and any(words in reason for words in REFUSALS):
                verdict = "refused"
        return Row(case.name, tier, verdict, time.monotonic() - began, outcome, reason)

    def _prove(self, case: Case, tier: str) -> Outcome:
        self.runs += 1
        place = self.folder / f"{self.runs}-{case.name}-{tier.replace(':', '-')}"
        total = Outcome()
        for number, life in enumerate(case.lives):
            wanted = self._without_tiers(case, number)
            flags = case.all_flags(number, self.device)
            size = case.block_bytes or wanted["bytes_per_block"]
            config = tiers.config(tier, case.blocks, size, place, flags, self._model(case, life.seed))
            found = self._answers(
                case,
                number,
                place / f"life{number}",
                num_gpu_blocks_override=case.blocks,
                kv_transfer_config=config,
            )
            tolerance = TOLERANCES[self.device][flags["dtype"]]
            _add(total, compare(life.plan(wanted["block"]), wanted, found, tolerance))
        if not self.keeps:
            shutil.rmtree(place, ignore_errors=True)
        return total

    def _without_tiers(self, case: Case, life: int) -> Any:
        """Asks such an engine only once for all tiers."""
        if (case.name, life) not in self.wanted:
            place = self.folder / f"plain-{case.name}-{life}"
            try:
                found = self._answers(case, life, place, num_gpu_blocks_override=MANY_BLOCKS)
            except children.Failed as exc:
                raise NoEngine(str(exc)) from exc
            self.wanted[case.name, life] = found
        return self.wanted[case.name, life]

    def _answers(self, case: Case, number: int, place: Path, **more: Any) -> Any:
        life = case.lives[number]
        folder = self._model(case, life.seed)
        flags = {"model": str(folder), **case.all_flags(number, self.device), **more}
        if self.device == "cuda":
            flags["kv_cache_memory_bytes"] = 1 << 30
        given: dict[str, Any] = {"case": case.name, "life": number, "flags": flags, "adapters": {}}
        if "speculative_config" in flags:
            flags["speculative_config"] = self._drafting(flags["speculative_config"], folder)
        if case.adapters:
            given["adapters"] = self._adapters(folder, life.adapter_seed)
            given["other_adapters"] = self._adapters(folder, 9)
        if case.other_weights:
            given["other_weights"] = str(self._other_weights(case, 78) / "model.safetensors")
        call = "tiers_proof.worker_engine:run" if case.by_worker else "tiers_proof.engines:run"
        return children.run(self.warm, call, given, place)

    def _model(self, case: Case, seed: int | None) -> Path:
        """A case that changes weights gets a folder of its own, in which they are as `seed` says."""
        made = models.make(case.model, self.folder / "models" / case.model)
        if not case.has_own_folder:
            return made
        own = self.folder / "models" / f"{case.name}-own"
        if not own.exists():
            shutil.copytree(made, own)
        right = made if seed is None else self._other_weights(case, seed)
        shutil.copy2(right / "model.safetensors", own)
        return own

    def _other_weights(self, case: Case, seed: int) -> Path:
        folder = self.folder / "models" / f"{case.model}-{seed}"
        base = self.folder / "models" / case.model
        return folder if folder.exists() else models.change_weights(base, folder, seed)

    def _drafting(self, config: dict[str, Any], folder: Path) -> dict[str, Any]:
        method = config["method"]
        if method not in guessing.MAKERS:
            return config
        made = self.folder / "models" / f"{folder.name}-{method}"
        return {**config, "model": str(made if made.exists() else guessing.make(method, made, folder))}

    def _adapters(self, base: Path, seed: int) -> dict[str, tuple[str, str]]:
        """Returns folders and contents by name. The folders are the same for all seeds but 9."""
        made = {}
        for number, name in enumerate("ab"):
            folder = self.folder / "adapters" / (f"{name}-9" if seed == 9 else name)
            make_adapter(folder, base, seed=2 * seed + number)
            made[name] = str(folder), f"{seed:02}{number:02}" * 16
        return made


def _add(total: Outcome, more: Outcome) -> None:
    for part in dataclasses.fields(Outcome):
        old, new = getattr(total, part.name), getattr(more, part.name)
        if part.name == "worst":
            total.worst = max(old, new)
        elif part.name == "sources":
            for source, count in new.items():
                old[source] = old.get(source, 0) + count
        else:
            setattr(total, part.name, old + new)


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    failed = 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tiers-proof-") as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        with zygote(folder) as warm:
            proof = Proof(warm, folder, options.device, keeps=options.logs is not None)
            for case in options.cases:
                for tier in options.tier:
                    if case.is_for_disk and tier not in tiers.ON_DISK:
                        continue
                    row = proof.row(case, tier)
                    rows.append(row)
                    print(row.text(), flush=True)
                    failed += row.verdict not in ("equal", "refused", "no engine")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    if options.page:
        print(page.table(rows))
    return 1 if failed else 0


def _options(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(
        prog="python scripts/tiers_proof", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="*", metavar="CASE", help=f"of: {', '.join(BY_NAME)}")
    parser.add_argument(
        "--tier",
        nargs="*",
        default=["host", "small-host"],
        metavar="TIER",
        help=f"of: {', '.join(tiers.TIERS)}",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: what vLLM is built for"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows there")
    parser.add_argument("--page", action="store_true", help="print a table in Markdown at the end")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the engines' logs there")
    options = parser.parse_args(argv)
    if options.device is None:
        from dynamo_vllm.engine.machine import device

        options.device = device()
    if unknown := [name for name in options.only or () if name not in BY_NAME]:
        parser.error(f"unknown case {unknown[0]!r}")
    chosen = [BY_NAME[name] for name in options.only] if options.only else CASES
    options.cases = [case for case in chosen if options.device in case.devices]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""), *sys.path[:3]]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return options
