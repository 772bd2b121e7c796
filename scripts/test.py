"""Runs the test tiers given, one pytest each, and says what each took; a tier without tests does not fail.

Further arguments for pytest come from PYTEST_ARGS. Tests marked `long` run only when these ask for them.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

TIERS = ("unit", "runtime", "contract", "cpu", "e2e", "bare", "deploy")
TWO = ("-n", "2", "--dist", "loadfile")
AT_ONCE = {"unit": ("-n", "auto"), "runtime": TWO, "bare": TWO, "deploy": ("-n", "auto")}
"""Engines would take the processor from each other; without them much of the time is waiting. Of those in
`bare` one has a core of its own.

The tests of a file share what it starts.
"""
BESIDE = {"contract": ("packages/omni-cpu/tests",)}
"""Packages of this repository have tests of their own."""
NO_TESTS = 5  # pytest's exit status
ROOT = Path(__file__).resolve().parent.parent


def main(tiers: list[str]) -> int:
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown:
        print(f"no tier called {', '.join(unknown)}; there are {', '.join(TIERS)}", file=sys.stderr)
        return 2
    rows = [run_tier(tier) for tier in tiers or TIERS]
    print("\n" + "\n".join(f"{tier:<10}{seconds:7.1f} s  {result}" for tier, seconds, result in rows))
    return int(any(result == "FAILED" for _, _, result in rows))


def run_tier(tier: str) -> tuple[str, float, str]:
    folder = ROOT / "tests" / tier
    if not folder.is_dir():
        return tier, 0.0, "no tests"
    print(f"\n== {tier} ==", flush=True)
    began = time.monotonic()
    asked = shlex.split(os.environ.get("PYTEST_ARGS", ""))
    chosen = () if "-m" in asked else ("-m", "not long")
    arguments = [*AT_ONCE.get(tier, ()), *chosen, *asked]
    folders = [folder, *(ROOT / path for path in BESIDE.get(tier, ()))]
    command = [sys.executable, "-m", "pytest", *folders, *arguments]
    code = subprocess.run(command, cwd=ROOT, env=environment()).returncode
    result = {0: "passed", NO_TESTS: "no tests"}.get(code, "FAILED")
    return tier, time.monotonic() - began, result


def environment() -> dict[str, str]:
    """Where bytecode is forbidden, each of the hundreds of processes would compile the package anew."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
