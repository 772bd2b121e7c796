"""Runs the contract tests and a short choice of the others with every vLLM that has a lock.

    python scripts/versions.py                            all versions
    python scripts/versions.py 0.32.0                     this one
    python scripts/versions.py --suite contract           without those that load a model

Each version has an environment of its own in `.versions/`, which scripts/setup.py makes once. Further
arguments for pytest come from PYTEST_ARGS.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import setup_packages

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".versions"
SUITES = {
    "contract": ("tests/contract",),
    "cpu": tuple(
        f"tests/cpu/test_{name}.py"
        for name in ("parity", "direct", "cancel", "disaggregation", "lora", "multimodal")
    ),
}
Run = Callable[[Sequence[str], Mapping[str, str]], int]


def main(arguments: list[str], run: "Run | None" = None) -> int:
    known = setup_packages.versions()
    parser = argparse.ArgumentParser(prog="versions.py", description="Tests with every supported vLLM.")
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"of {', '.join(known)} (default: all)"
    )
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this one; may be repeated")
    options = parser.parse_args(arguments)
    if unknown := [version for version in options.versions if version not in known]:
        parser.error(f"no lock for vLLM {', '.join(unknown)}; there are {', '.join(known)}")
    rows = [
        (version, *row)
        for version in options.versions or known
        for row in tried(version, options.suite or [*SUITES], run or call)
    ]
    print(
        "\n"
        + "\n".join(
            f"{version:<10}{suite:<10}{taken:7.1f} s  {outcome}" for version, suite, taken, outcome in rows
        )
    )
    return int(any(outcome == "FAILED" for *_, outcome in rows))


def tried(version: str, suites: list[str], run: Run) -> list[tuple[str, float, str]]:
    """Return suite, seconds and outcome of each; without an environment no tests run."""
    environment = environment_of(version)
    steps = {"set-up": [sys.executable, str(ROOT / "scripts" / "setup.py"), "dev"]}
    more = ["-m", "not long", *shlex.split(environment.pop("PYTEST_ARGS", ""))]
    python = str(ENVIRONMENTS / version / "bin" / "python")
    steps |= {suite: [python, "-m", "pytest", "-q", *SUITES[suite], *more] for suite in suites}
    rows = []
    for name, command in steps.items():
        print(f"\n== vLLM {version}: {name} ==", flush=True)
        began = time.monotonic()
        outcome = "FAILED" if run(command, environment) else "passed"
        rows.append((name, time.monotonic() - began, outcome))
        if name == "set-up" and outcome == "FAILED":
            break
    return rows


def environment_of(version: str) -> dict[str, str]:
    """Return the variables for a version, without extras: some are not for every version."""
    folder = ENVIRONMENTS / version
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    given = {name: value for name, value in os.environ.items() if name != "DYNAMO_VLLM_EXTRAS"}
    return {**given, "DYNAMO_VLLM_VENV": str(folder), "DYNAMO_VLLM_VLLM": version, "PATH": path}


def call(command: Sequence[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
