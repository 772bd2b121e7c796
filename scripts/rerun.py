"""Runs pytest, and the few tests that failed once more, one after the other.

A machine that loses seconds to its neighbours may stop any process at any moment. What passes only when it
runs alone is named in the result: each is a test, or a race in the product, to mend.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_AGAIN = 8
"""With more failures than these, something is broken."""
FAILED, NO_TESTS = 1, 5  # pytest's exit status
ALONE = "passed; only when run alone: "


def run(
    pytest: Callable[[Sequence[str]], int],
    at_once: Sequence[str],
    arguments: Sequence[str],
    cache: Path,
    tries: int,
) -> str:
    """Return the result in words; `at_once` are arguments for the first run only."""
    arguments = ["-o", f"cache_dir={cache}", *arguments]
    if tries > 1:
        file_of_failures(cache).unlink(missing_ok=True)
    code = pytest([*at_once, *arguments])
    return result_of(code) if tries == 1 else after(code, pytest, arguments, cache)


def after(code: int, pytest: Callable[[Sequence[str]], int], arguments: Sequence[str], cache: Path) -> str:
    """Return the result of a run that ended with this exit status, or of a second one."""
    last_failed = file_of_failures(cache)
    if code != FAILED or not last_failed.exists():
        return result_of(code)
    failed = sorted(json.loads(last_failed.read_text()))
    if len(failed) > MOST_AGAIN:
        return "FAILED"
    print(f"\n== once more, alone: {', '.join(failed)} ==", flush=True)
    if pytest(["--last-failed", *arguments]) != 0:
        return "FAILED twice"
    return f"{ALONE}{', '.join(failed)}"


def file_of_failures(cache: Path) -> Path:
    return cache / "v" / "cache" / "lastfailed"


def result_of(code: int) -> str:
    return {0: "passed", NO_TESTS: "no tests"}.get(code, "FAILED")


def all_of(results: Sequence[str]) -> str:
    """Return one result for tests that ran in parts."""
    worst = sorted(one for one in results if one.startswith("FAILED"))
    if worst:
        return worst[0]
    alone = [one.removeprefix(ALONE) for one in results if one.startswith(ALONE)]
    if alone:
        return ALONE + ", ".join(alone)
    return "passed" if "passed" in results else "no tests"
