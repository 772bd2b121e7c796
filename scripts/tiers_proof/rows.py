"""Keeps the outcomes of a run, one row for each case with each tier, and saves them after each."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_vllm.engine.patches.patch import installed
from tiers_proof.compare import Outcome

GOOD = ("equal", "refused", "no engine", "noticed")


@dataclass
class Row:
    """One case with one tier."""

    case: str
    tier: str
    verdict: str
    seconds: float
    outcome: Outcome | None = None
    reason: str = ""

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD

    def text(self) -> str:
        head = f"{self.case:16} {self.tier:14} {self.seconds:6.1f} s  {self.verdict:9}"
        found = self.outcome
        if found is None:
            return f"{head} {self.reason}"
        told = f"{found.requests} answers, {found.loaded} tokens loaded {found.sources or ''}"
        told += f", {found.preemptions} preempted, largest difference {found.worst:.1e}"
        told += f" of {found.tolerance:.1e}, {found.ties} ties"
        return "; ".join([f"{head} {told}", *found.wrong[:2], *found.empty[:2]])


@dataclass
class Table:
    """All rows of one machine."""

    machine: str
    vllm: str
    rows: list[Row] = field(default_factory=list)
    _saving: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: Row, file: Path | None) -> None:
        with self._saving:
            self.rows.append(row)
            if file is not None:
                new = file.with_name(file.name + ".new")
                new.write_text(json.dumps(self.as_json(), indent=1))
                os.replace(new, file)

    def as_json(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"machine": self.machine, "vllm": self.vllm, "rows": rows}


def load(file: Path) -> Table:
    told = json.loads(file.read_text())
    rows = [
        Row(**{**row, "outcome": None if row["outcome"] is None else Outcome(**row["outcome"])})
        for row in told["rows"]
    ]
    return Table(told["machine"], told["vllm"], rows)


def new_table(device: str) -> Table:
    return Table(machine_name(device), str(installed("vllm")))


def machine_name(device: str) -> str:
    """Returns the name of the GPU, without use of CUDA, or the kind of the CPU."""
    if device == "cuda" and shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        return told.removeprefix("NVIDIA ").strip() or device
    return f"CPU ({platform.machine()})" if device == "cpu" else device
