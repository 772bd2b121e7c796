"""Runs one case with one tier and returns its row: asks an engine without tiers and one with them."""

from __future__ import annotations

import math
import shutil
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.warm import Zygote
from tiers_proof import children, tiers
from tiers_proof.case import TOLERANCES, WIDEST_TOLERANCE, Case
from tiers_proof.compare import Outcome, add, compare, contradiction
from tiers_proof.ingredients import Ingredients
from tiers_proof.requests import Phase, in_other_orders
from tiers_proof.rows import Row

MANY_BLOCKS = 1024
"""The cache of an engine without tiers: everything fits."""
ORDERS = 3
"""On a GPU, an engine without tiers whose cache is as small as with them is asked the crowd in other orders
too: a log-probability depends on what is computed together, and how much says which difference counts."""
REFUSALS = ("KV tiers:", "not currently supported with KV connectors")
"""Words of errors that refuse tiers: our own, and vLLM's."""
_ANY_BLOCK_BYTES = 1 << 20
_ON_GPU = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
"""Several engines share the GPU. vLLM refuses to start if the second part of its memory is not free."""


class NoEngine(Exception):
    """vLLM cannot run this case on this machine, or gives different answers, without tiers either."""


class TimeIsUp(Exception):
    """No more engines are started."""


@dataclass
class Proof:
    """Runs cases on one machine."""

    warm: Zygote
    folder: Path
    device: str
    ends: float = math.inf
    """When no more engines are started, on the monotonic clock."""
    keeps: bool = False
    """Whether to keep the files of all engines, not only of those with a bad outcome."""
    runs: int = 0
    wanted: dict[tuple[str, int], Any] = field(default_factory=dict)
    """The answers without tiers, by case and life; or why there are none."""
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _asking: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def __post_init__(self) -> None:
        self._ingredients = Ingredients(self.folder)

    def row(self, case: Case, tier: str) -> Row:
        began = time.monotonic()
        verdict, outcome, reason = "FAILED", None, ""
        with self._counting:
            self.runs += 1
            place = self.folder / f"{self.runs}-{case.name}-{tier.replace(':', '-')}"
        try:
            outcome = self._prove(case, tier, place)
            verdict = outcome.verdict
            if tier.startswith("broken:"):
                verdict = "noticed" if outcome.wrong else "NOT NOTICED"
        except NoEngine as exc:
            verdict, reason = "no engine", str(exc)
        except TimeIsUp:
            verdict, reason = "NOT RUN", "the time is up"
        except children.Failed as exc:
            reason = str(exc)
            if self.device in case.refused_on and any(words in reason for words in REFUSALS):
                verdict = "refused"
        except Exception as exc:  # the other cases go on
            traceback.print_exc()
            reason = f"{type(exc).__name__}: {exc}"
        row = Row(case.name, tier, verdict, time.monotonic() - began, outcome, reason)
        if row.is_good and not self.keeps:
            shutil.rmtree(place, ignore_errors=True)
        return row

    def prepare(self, case: Case) -> None:
        """Asks the engines without tiers, before a row needs their answers. Raises NoEngine."""
        for number in range(len(case.lives)):
            self._without_tiers(case, number)

    def _prove(self, case: Case, tier: str, place: Path) -> Outcome:
        if self.device in case.refused_on:  # also where an engine without tiers contradicts itself
            self._start(case, 0, tier, place / "refused", _ANY_BLOCK_BYTES)
        total = Outcome()
        for number, life in enumerate(case.lives):
            wanted = self._without_tiers(case, number)
            size = case.size_of_block(number, self.device) or wanted["bytes_per_block"]
            found = self._start(case, number, tier, place, size)
            phases = life.plan(wanted["block"])[: len(found["phases"])]
            right = {**wanted, "phases": wanted["phases"][: len(found["phases"])]}
            add(total, compare(phases, right, found, wanted["tolerance"]))
        if tier in tiers.ON_DISK and not total.sources.get("disk"):
            total.empty.append("nothing came from the disk")
        return total

    def _start(self, case: Case, number: int, tier: str, place: Path, block_bytes: int) -> Any:
        """Returns the answers of an engine with the tier."""
        flags = case.all_flags(number, self.device)
        model = self._ingredients.model(case, case.lives[number].seed)
        blocks = case.own_blocks(self.device)
        config = tiers.config(tier, blocks, block_bytes, place, flags, model)
        own: dict[str, Any] = {"num_gpu_blocks_override": blocks, "kv_transfer_config": config}
        last = _first_loads(case.lives[number].plan(32)) if tier.startswith("broken:") else None
        return self._answers(case, number, place / f"life{number}", last, **own)

    def _without_tiers(self, case: Case, life: int) -> Any:
        """Asks such an engine only once for all tiers. Raises NoEngine."""
        known = case.name, life
        with self._asking[case.name]:
            if known not in self.wanted:
                self.wanted[known] = self._asked(case, life)
        if isinstance(self.wanted[known], NoEngine):
            raise self.wanted[known]
        return self.wanted[known]

    def _asked(self, case: Case, life: int) -> Any:
        place, plan = self.folder / f"plain-{case.name}-{life}", case.lives[life].plan
        tolerance = TOLERANCES[self.device][case.all_flags(life, self.device)["dtype"]]
        try:
            found = self._answers(case, life, place, None, num_gpu_blocks_override=MANY_BLOCKS)
            asked = [(plan(found["block"]), found)]
            # On x86_64 some kernels round differently in another batch, too.
            is_wide = self.device == "cuda" or contradiction(asked, tolerance) is not None
            if is_wide:
                blocks = case.own_blocks(self.device)
                again = self._answers(case, life, place / "few", None, ORDERS, num_gpu_blocks_override=blocks)
                asked.append((in_other_orders(plan(again["block"]), ORDERS), again))
        except children.Failed as exc:
            return NoEngine(str(exc))
        while (told := contradiction(asked, tolerance)) is not None:
            tolerance *= 2
            if tolerance > WIDEST_TOLERANCE:
                return NoEngine(f"without tiers, {told}")
        return {**found, "tolerance": 2 * tolerance if is_wide else tolerance}

    def _answers(
        self, case: Case, number: int, place: Path, last: int | None, orders: int = 0, **more: Any
    ) -> Any:
        if time.monotonic() > self.ends:
            raise TimeIsUp
        life, made = case.lives[number], self._ingredients
        folder = made.model(case, life.seed)
        of_device = _ON_GPU if self.device == "cuda" else {}
        flags = {"model": str(folder), **of_device, **case.all_flags(number, self.device), **more}
        given: dict[str, Any] = {
            "case": case.name,
            "life": number,
            "last": last,
            "orders": orders,
            "flags": flags,
            "adapters": {},
        }
        if "speculative_config" in flags:
            flags["speculative_config"] = made.drafting(flags["speculative_config"], folder)
        if case.adapters:
            given["adapters"] = made.adapters(case, folder, life.adapter_seed)
            given["other_adapters"] = made.adapters(case, folder, 9)
        if case.other_weights:
            given["other_weights"] = str(made.other_weights(case, 78) / "model.safetensors")
        call = "tiers_proof.worker_engine:run" if case.by_worker else "tiers_proof.engines:run"
        return children.run(self.warm, call, given, place, children.LIMIT_SECONDS[self.device])


def _first_loads(phases: Sequence[Phase]) -> int:
    """Returns after how many phases a wrong tier must be noticed: those up to the first one that loads."""
    return 1 + next(at for at, phase in enumerate(phases) if phase.loads)
