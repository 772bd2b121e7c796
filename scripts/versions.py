"""Runs the contract tests and a short choice of the others with every vLLM that has a lock.

    python scripts/versions.py                            all versions
    python scripts/versions.py 0.31.0                     this one
    python scripts/versions.py --others                   all but the default, which `make test` tests
    python scripts/versions.py --suite contract           without those that load a model
    python scripts/versions.py --changed                  without those that scripts/unchanged.py leaves out

Each version has an environment of its own in `.versions/`, which scripts/setup.py makes once; the one that
vLLM-Omni is for has it too. Further arguments for pytest come from PYTEST_ARGS.
"""

import argparse
import functools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import rerun
import setup
import setup_packages
import unchanged

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".versions"
SUITES = {
    "contract": ("tests/contract",),
    "names": ("tests/contract/test_docs_names.py",),
    "short": tuple(
        f"tests/cpu/test_{name}.py"
        for name in ("parity", "direct", "cancel", "disaggregation", "lora", "multimodal")
    ),
    "omni": (
        "tests/contract/test_omni.py",
        "tests/cpu/test_omni.py",
        "tests/cpu/test_demo_training.py::test_diffusers_draws_the_same_pictures",
        "packages/omni-cpu/tests",
    ),
}
WITHOUT = {
    "contract": tuple(
        f"--ignore=tests/contract/{path}" for path in ("demo", "test_docs_names.py", "test_omni.py")
    )
}
"""What another suite of the same version runs, and scripts that run with the default vLLM only."""
OMNI_EXPECTED = {"DYNAMO_VLLM_TEST_OMNI": "1"}
"""With it a test that needs vLLM-Omni and does not find it fails; without, it is skipped."""
UNWANTED = ("DYNAMO_VLLM_EXTRAS", "DYNAMO_VLLM_TEST_OMNI", "PYTHONDONTWRITEBYTECODE")
Run = Callable[[Sequence[str], Mapping[str, str]], int]


def main(arguments: list[str], run: "Run | None" = None) -> int:
    known = setup_packages.versions()
    parser = argparse.ArgumentParser(prog="versions.py", description="Tests with every supported vLLM.")
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"of {', '.join(known)} (default: all)"
    )
    parser.add_argument("--others", action="store_true", help="all but the default")
    parser.add_argument(
        "--suite",
        action="append",
        choices=SUITES,
        help="only this one; may be repeated; omni is for those that vLLM-Omni is for",
    )
    parser.add_argument(
        "--changed", action="store_true", help="only suites whose inputs have changed since they passed"
    )
    options = parser.parse_args(arguments)
    if unknown := [version for version in options.versions if version not in known]:
        parser.error(f"no lock for vLLM {', '.join(unknown)}; there are {', '.join(known)}")
    left_out = {setup_packages.default_version()} if options.others else set()
    chosen = [version for version in options.versions or known if version not in left_out]
    suites = options.suite or [*SUITES]
    if suites == ["omni"]:
        chosen = [version for version in chosen if has_omni(version)]
    if not chosen:
        parser.error(f"nothing is left to run; vLLM-Omni is for vLLM {setup_packages.OMNI_NEEDS}x")
    rows = [
        (version, *row)
        for version in chosen
        for row in tried(version, suites, run or call, passes_of(version, not options.changed))
    ]
    print(
        "\n"
        + "\n".join(
            f"{version:<10}{suite:<10}{taken:7.1f} s  {outcome}" for version, suite, taken, outcome in rows
        )
    )
    return int(any(outcome.startswith("FAILED") for *_, outcome in rows))


def passes_of(version: str, is_complete: bool) -> unchanged.Choice:
    """Return which suites need not run with this version; nothing is known of a choice of tests."""
    if os.environ.get("PYTEST_ARGS"):
        return unchanged.Choice()
    machine = unchanged.machine(setup.choose_device(), version, has_omni(version))
    return unchanged.choose(["versions"], machine, is_complete)


def tried(
    version: str, suites: list[str], run: Run, passes: unchanged.Choice
) -> list[tuple[str, float, str]]:
    """Return suite, seconds and outcome of each; without an environment no tests run."""
    environment = environment_of(version)
    asked = shlex.split(environment.pop("PYTEST_ARGS", ""))
    python = str(ENVIRONMENTS / version / "bin" / "python")

    def set_up() -> str:
        command = [sys.executable, str(ROOT / "scripts" / "setup.py"), "dev"]
        return "FAILED" if run(command, environment) else "passed"

    def test(suite: str) -> str:
        def pytest(arguments: Sequence[str]) -> int:
            tests = [*SUITES[suite], *WITHOUT.get(suite, ())]
            return run([python, "-m", "pytest", "-q", *tests, *arguments], environment)

        tries = 1 if asked else 2
        cache = ROOT / ".pytest_cache" / f"{version}-{suite}"
        return rerun.run(pytest, (), ["-m", "not long", *asked], cache, tries)

    fitting = [suite for suite in suites if suite != "omni" or has_omni(version)]
    left_out = [(suite, 0.0, passes.unchanged[suite]) for suite in fitting if suite in passes.unchanged]
    chosen = [suite for suite in fitting if suite not in passes.unchanged]
    if not chosen:
        return left_out
    steps: dict[str, Callable[[], str]] = {
        "set-up": set_up,
        **{suite: functools.partial(test, suite) for suite in chosen},
    }
    rows: list[tuple[str, float, str]] = []
    for name, step in steps.items():
        print(f"\n== vLLM {version}: {name} ==", flush=True)
        began = time.monotonic()
        outcome = step()
        rows.append((name, time.monotonic() - began, outcome))
        if outcome == "passed" and name in passes.changed:
            passes.passed(name)
        if name == "set-up" and outcome == "FAILED":
            break
    return [*rows, *left_out]


def has_omni(version: str) -> bool:
    return version.startswith(setup_packages.OMNI_NEEDS)


def environment_of(version: str) -> dict[str, str]:
    """Return the variables for a version, without extras: some are not for every version."""
    folder = ENVIRONMENTS / version
    given = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    if has_omni(version):
        given |= {"DYNAMO_VLLM_EXTRAS": "omni", **OMNI_EXPECTED}
    return {
        **given,
        "DYNAMO_VLLM_VENV": str(folder),
        "DYNAMO_VLLM_VLLM": version,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def call(command: Sequence[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
