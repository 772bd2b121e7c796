"""Runs one stage of load on one server with `dynamo-vllm bench load`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.settings import MODEL_NAME, VOCABULARY, Stage

COMMAND = (sys.executable, "-m", "dynamo_vllm.cli.main", "bench", "load")
STAGE_SECONDS = 300


class LoadFailed(Exception):
    """The load generator failed; the text is its message."""


def words(url: str, stage: Stage, seed: int, clients: int | None) -> list[str]:
    """Return the arguments of the load, the same for every peer of a round."""
    return [
        *(url, "--model", MODEL_NAME, "--api", "completions", "--prompts", "random"),
        *("--input-tokens", str(stage.input_tokens), "--output-tokens", str(stage.output_tokens)),
        *("--vocab", f"{VOCABULARY[0]}:{VOCABULARY[1]}", "--seed", str(seed)),
        *("--concurrency", str(stage.concurrency)),
        *(("--seconds", str(stage.seconds)) if stage.seconds else ("--requests", str(stage.requests))),
        *("--warmup", str(stage.warmup), "--quiet"),
        *(("--clients", str(clients)) if clients else ()),
    ]


def run(
    url: str, stage: Stage, seed: int, watched: Mapping[str, int], clients: int | None = None
) -> dict[str, Any]:
    """Run a stage; return its part of the report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "load.json")
        watch = [word for label, pid in watched.items() for word in ("--watch", f"{label}={pid}")]
        command = [*COMMAND, *words(url, stage, seed, clients), *watch, "--json", str(report)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=STAGE_SECONDS, check=False)
        except subprocess.TimeoutExpired as exc:
            raise LoadFailed(f"{stage.name} took longer than {STAGE_SECONDS} s") from exc
        if done.returncode or not report.exists():
            raise LoadFailed(
                f"bench load ended with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}"
            )
        (found,) = json.loads(report.read_bytes())["stages"]
        return dict(found)
