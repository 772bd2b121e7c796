"""The Makefile, with programs in the place of ours that tell how they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def made(tmp_path: Path, *words: str) -> str:
    told = tmp_path / "python"
    told.write_text('#!/bin/sh\necho "$PYTEST_ARGS|$*"\n')
    told.chmod(0o755)
    command = ["make", "--no-print-directory", f"BIN={tmp_path}", "PYTHON=true", *words]
    # Of a make that runs these tests it would take over more than its words.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("test", '-k "lora or media"|scripts/test.py'),
        ("test-unit", '-k "lora or media"|scripts/test.py unit'),
        ("test-more", '-k "lora or media"|scripts/test.py more'),
        ("test-long", '-m long -k "lora or media"|scripts/test.py'),
    ],
)
def test_arguments_with_quotes_reach_pytest_whole(target: str, told: str, tmp_path: Path) -> None:
    assert made(tmp_path, target, 'ARGS=-k "lora or media"').strip() == told


@pytest.mark.parametrize(
    ("target", "asked"),
    [("venv", ""), ("serve", ""), ("docs", ""), ("test", " dev"), ("test-unit", " dev"), ("check", " dev")],
)
def test_what_only_tests_need_comes_with_the_tests(target: str, asked: str) -> None:
    command = ["make", "--no-print-directory", "--dry-run", "PYTHON=python", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines()[0] == f"python scripts/setup.py{asked}"
