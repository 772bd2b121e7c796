"""Provides the Python of each peer: the project's own, or an environment under .bench, created once.

Upstream's lies over the project's environment: a `.pth` adds that one's packages behind its own, so torch and
vLLM are the same files for every peer, and only what upstream adds is installed.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCH = ROOT / ".bench"
UPSTREAM_VERSION = "1.6.1"
UPSTREAM_NEEDS = ("kubernetes>=32.0.1,<33", "redis>=6.2,<9", "zstandard>=0.23,<1")
"""What `dynamo.frontend` and `dynamo.vllm` import beyond what vLLM brings. The wheel's other requirements are
for its planner or would replace parts of vLLM's environment."""
SGLANG_SECONDS = 1200
SGLANG_CPU_OPERATOR = b"init_cpu_threads_env"
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")


class NotHere(Exception):
    """This peer cannot run on this machine; the text is the reason, in one line."""


@dataclass(frozen=True)
class Environments:
    """Finds each environment by name; on a host without an index all are this interpreter."""

    folder: Path = BENCH
    this_interpreter_only: bool = False

    def python(self, name: str) -> str:
        """Return the interpreter of an environment, which is created if needed."""
        if name == "own" or self.this_interpreter_only:
            return sys.executable
        home, maker = self.folder / "envs" / name, MAKERS[name]
        ready, failed = home / ".ready", home / ".failed"
        recipe = f"{sys.prefix} {UPSTREAM_VERSION} {' '.join(UPSTREAM_NEEDS)}\n"
        if _read(ready) != recipe:
            if reason := _read(failed):
                raise NotHere(f"{reason.strip()} (tried before; remove {failed} to try again)")
            began = time.monotonic()
            print(f"making the environment of {name}, its log is {home}.log …", flush=True)
            try:
                maker(home)
            except NotHere as exc:
                failed.write_text(f"{exc}\n")
                raise
            ready.write_text(recipe)
            print(f"  ready after {time.monotonic() - began:.0f} s", flush=True)
        return str(home / "bin" / "python")


def make_upstream(home: Path) -> None:
    create(home)
    own = sysconfig.get_path("purelib")
    # Not a plain path line: the `.pth` files in there count too (the torchvision hook, the editable install).
    (site_packages(home) / "peers_base.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    kept = home / "constraints.txt"
    kept.write_text("\n".join(f"{d.name}=={d.version}" for d in _installed()) + "\n")
    pip(home, "install", "--no-deps", f"ai-dynamo=={UPSTREAM_VERSION}")
    pip(home, "install", "--constraint", str(kept), *UPSTREAM_NEEDS)
    verify(home, "dynamo.frontend", "dynamo.vllm", "torchvision")


def make_sglang(home: Path) -> None:
    """From the package index alone; nothing is compiled.

    Its kernels come first: SGLang 0.5.23 installs anywhere, 9 GB of it, and fails at its first step on a CPU
    when the kernels are those of a CUDA build, as on PyPI. Its CPU build is made from source.
    """
    create(home)
    pip(home, "install", "--no-deps", "--only-binary", ":all:", "sglang-kernel")
    libraries = [
        path for path in site_packages(home).rglob("*.so") if SGLANG_CPU_OPERATOR in path.read_bytes()
    ]
    if not libraries:
        raise NotHere(
            "the sglang-kernel wheel of this package index has no CPU operators "
            f"({SGLANG_CPU_OPERATOR.decode()}); SGLang for CPU is built from source"
        )
    pip(home, "install", "--only-binary", ":all:", "sglang", seconds=SGLANG_SECONDS)
    verify(home, "sglang", "sglang.launch_server")


MAKERS: dict[str, Callable[[Path], None]] = {"upstream": make_upstream, "sglang": make_sglang}


def create(home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(home)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotHere(f"the environment could not be made: {last_line(done.stdout + done.stderr)}")


def pip(home: Path, *words: str, seconds: float = 600) -> None:
    """Run pip as the project's set-up does: output in the log, progress on the terminal."""
    report: Any = importlib.import_module("setup_report")
    report.LOG = f"{home}.log"
    command = [str(home / "bin" / "python"), "-m", "pip", words[0], *PIP_OPTIONS, *words[1:]]
    code, output = report.follow(["timeout", str(int(seconds)), *command])
    if code == 124:
        raise NotHere(f"pip {' '.join(words)} took longer than {seconds:.0f} s")
    if code:
        errors = [line for line in output.splitlines() if line.startswith("ERROR")]
        raise NotHere(f"pip {' '.join(words)}: {last_line(os.linesep.join(errors) or output)}")


def verify(home: Path, *modules: str) -> None:
    for module in modules:
        command = [str(home / "bin" / "python"), "-c", f"import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home)
        if done.returncode:
            raise NotHere(f"{module} does not import: {last_line(done.stderr)}")


def site_packages(home: Path) -> Path:
    (found,) = home.glob("lib/python3*/site-packages")
    return found


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it wrote nothing"


def _installed() -> list[metadata.Distribution]:
    editable = "dynamo-vllm"
    found = {d.name: d for d in metadata.distributions() if d.name and d.name != editable}
    return sorted(found.values(), key=lambda d: d.name.lower())


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
