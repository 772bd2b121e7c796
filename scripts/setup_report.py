"""Runs the commands of a set-up: output to a log, progress to the terminal, advice when one fails."""

import os
import sys

TYPE_CHECKING = False  # as type checkers understand it; the module of that name need not be imported
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    Saying = Callable[[list[str]], str]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.abspath(os.environ.get("DYNAMO_VLLM_VENV") or os.path.join(ROOT, ".venv"))
LOG = os.path.join(VENV, "setup.log")
LOG_LINES_SHOWN = 20
PYTHON_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
VENV_ADVICE = f"Run: apt install python{PYTHON_VERSION}-venv (or python3-venv), then this again."
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FULL_DISK = "No space left on device|Disk quota exceeded"
NO_NETWORK = (
    "name resolution|Name or service not known|NewConnectionError|Network is unreachable|Connection refused"
    "|ConnectTimeout|Read timed out|operation timed out|dns error|tcp connect error|ProxyError|SSLError"
)


class SetupError(Exception):
    """The set-up failed; the message says what went wrong and what to do."""


def run(command: list[str], failure: str, env: "dict[str, str] | None" = None) -> str:
    """Run a short command and return its output, which is shown if it fails."""
    import subprocess

    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    log(f"$ {' '.join(command)}\n{done.stdout}")
    if done.returncode != 0:
        raise failed(failure, done.stdout)
    return done.stdout


def follow(
    command: list[str], env: "dict[str, str] | None" = None, saying: "Saying | None" = None
) -> tuple[int, str]:
    """Run a long command with its output in the log, and show its progress on the terminal."""
    import subprocess
    import threading
    import time

    lines: list[str] = []
    began = time.monotonic()
    log(f"$ {' '.join(command)}")
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        done = threading.Event()
        teller = threading.Thread(target=tell, args=(lines, began, done, saying or doing))
        teller.start()
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                log(lines[-1])
        finally:
            done.set()
            teller.join()
    return process.returncode, "\n".join(lines)


def tell(lines: list[str], began: float, done: "threading.Event", saying: "Saying") -> None:
    """Show progress: one changing line on a terminal, a new line every 30 s in a file or CI log."""
    import time

    live = sys.stdout.isatty()
    width = 0
    while not done.wait(0.5 if live else 30):
        text = f"      {time.monotonic() - began:4.0f} s  {saying(lines)}"
        width = max(width, len(text))
        print(f"\r{text:<{width}}" if live else text, end="" if live else "\n", flush=True)
    if live and width:
        print("\r" + " " * width + "\r", end="", flush=True)


def doing(lines: list[str]) -> str:
    """Summarise the last step that uv or pip reports."""
    for line in reversed(lines):
        words = line.split()
        if words[:1] == ["Downloading"]:
            return f"downloading {words[1].rpartition('/')[2][:50]} {' '.join(words[2:])}"
        if words[:1] == ["Collecting"]:
            return f"looking up {words[1][:50]}"
        if words[:1] == ["Processing"]:
            return f"reading {words[1].rpartition('/')[2][:50]}"
        if words[:2] == ["Installing", "collected"]:
            return f"unpacking {len(words) - 3} packages"
        if words[:1] == ["Resolved"]:
            return f"fetching {words[1]} packages"
        if words[:1] in (["Prepared"], ["Installed"]):
            return f"placing {words[1]} packages"
    return "looking up packages"


def log(text: str) -> None:
    try:
        with open(LOG, "a") as file:
            file.write(text + "\n")
    except OSError:
        pass  # a full disk; the installer will say so on its own


def failed(what: str, output: str) -> SetupError:
    tail = "\n".join(f"  | {line}" for line in output.strip().splitlines()[-LOG_LINES_SHOWN:])
    return SetupError(f"{what}. {advice(output)}\n\n{tail}\n\nThe whole log: {os.path.relpath(LOG)}")


def is_fault_of_machine(output: str) -> bool:
    """Return whether another installer would fail in the same way."""
    import re

    return re.search(f"{FULL_DISK}|{NO_NETWORK}", output) is not None


def advice(output: str) -> str:
    import re

    known = {
        FULL_DISK: "The disk is full: make room and run this again.",
        "ensurepip": VENV_ADVICE,
        NO_NETWORK: (
            "A package index could not be reached: check the network and the proxy. Needed are pypi.org and, "
            f"for CPU, {TORCH_CPU_INDEX}, or a mirror with torch's +cpu build (see PIP_INDEX_URL)."
        ),
        "No matching distribution found|requires a different Python|is not a supported wheel": (
            f"A package has no build for Python {PYTHON_VERSION} on this machine. vLLM and torch 2.13 "
            "have builds for 3.11 to 3.14 on Linux x86_64 and aarch64; try: make PYTHON=python3.12 venv"
        ),
        "Permission denied": "A file could not be written: check who owns this folder and its .venv.",
        "MemoryError|Killed": "The machine ran out of memory.",
    }
    return next(
        (text for pattern, text in known.items() if re.search(pattern, output)), "Read the lines below."
    )
