"""Help is what one asks for first: it must not wait for vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dynamo_vllm.cli import main as cli

MOST_MODULES = 450
"""About a hundred of them ours; processor time would differ from machine to machine."""
HEAVY = {"vllm", "torch", "transformers", "dynamo", "httpx"}
RUN = "import sys; from dynamo_vllm.cli.main import run; code = run(sys.argv[1:])"
REPORT = f"""
heavy = sorted({HEAVY!r} & set(sys.modules))
many = len(sys.modules) > {MOST_MODULES} and f'{{len(sys.modules)}} modules'
sys.exit(code or ' '.join(heavy) or many or 0)
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        [],
        ["--version"],
        *([name, "--help"] for name in {module: name for name, (module, _) in cli.COMMANDS.items()}.values()),
        ["bench", "load", "--help"],
    ],
)
def test_help_is_instant_and_imports_nothing_heavy(argv: list[str]) -> None:
    command = [sys.executable, "-c", RUN + REPORT, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("argv", [["serve", "--help"], ["check", "--no-engine"]])
def test_reader_who_has_enough_ends_it_without_a_word(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-u", "-m", "dynamo_vllm.cli.main", *argv]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=30)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
