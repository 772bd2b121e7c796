"""`bench scale` on the real runtime."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import commands
from harness.stack import environment

pytestmark = pytest.mark.more

REQUESTS, TOKENS = 96, 64
MOST_FOR_TWO = 1.6
"""What a token may cost with two frontends, in ratio to one."""


def bench(tmp_path: Path, *args: str) -> tuple[str, list[dict[str, Any]]]:
    file = tmp_path / "scale.json"
    env = environment(tmp_path, TMPDIR=str(tmp_path))
    done = commands.run(env, "bench", "scale", "--output", str(file), *args, seconds=110)
    assert done.returncode == 0, done.stdout + done.stderr
    started = [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())
    ]
    assert started == [], "everything it started has ended"
    return done.stdout, json.loads(file.read_text())["measured"]


@pytest.mark.timeout(120)
def test_two_frontends_list_all_workers_and_cost_little_more_than_one(tmp_path: Path) -> None:
    load = ("--streams", "16", "--requests", str(REQUESTS), "--output-tokens", str(TOKENS), "--rounds", "3")
    text, (one, two) = bench(tmp_path, "--frontends", "1,2", "--workers", "3", *load)
    assert "1 × 3" in text and "2 × 3" in text
    for found in (one, two):
        assert found["begun"]["list_seconds"] > 0 and found["late"]["list_seconds"] >= 0
        assert found["begun"]["rss_mb"] > 0
        for measured in found["rounds"]:
            assert (measured["ok"], measured["failed"]) == (REQUESTS, 0), measured["errors"]
            assert measured["tokens"] == REQUESTS * TOKENS
            assert 1 < measured["streams"] <= 16, (
                "those open at once; a busy machine ends some before others begin"
            )
            assert measured["frontend_us"] > 0 and measured["worker_us"] > 0

    def cost(found: dict[str, Any]) -> float:
        return statistics.median(float(m["frontend_us"]) + float(m["worker_us"]) for m in found["rounds"])

    assert cost(two) <= MOST_FOR_TWO * cost(one)
