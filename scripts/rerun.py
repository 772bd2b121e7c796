"""Runs a test once more, alone, if it is the only one of its tier that failed.

A machine that loses seconds to its neighbours may stop any process at any moment. What passes only when it
runs alone is a test, or a race in the product, to mend: it is written to tests/retried.toml, where somebody
fills in the reason. A test that is there already is not run again, so its next failure counts.
"""

import json
import platform
import tomllib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

RETRIED = Path(__file__).resolve().parent.parent / "tests" / "retried.toml"
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
    if tries == 1:
        return result_of([code])
    return after([code], [cache], [lambda: pytest(["--last-failed", *arguments])])


def after(codes: Sequence[int], caches: Sequence[Path], again: Sequence[Callable[[], int]]) -> str:
    """Return the result of the parts of a tier, or of a second try of the only test that failed in them."""
    failed = [(test, part) for part, cache in enumerate(caches) for test in failures(cache)]
    if not {*codes} <= {0, NO_TESTS, FAILED} or len(failed) != 1:
        return result_of(codes)
    ((test, part),) = failed
    if test in {entry["test"] for entry in retried()}:
        return f"FAILED, and tests/retried.toml has it already: {test}"
    print(f"\n== once more, alone: {test} ==", flush=True)
    if again[part]() != 0:
        return "FAILED twice"
    write(test)
    return f"{ALONE}{test}"


def failures(cache: Path) -> list[str]:
    path = file_of_failures(cache)
    return [*json.loads(path.read_text())] if path.exists() else []


def file_of_failures(cache: Path) -> Path:
    return cache / "v" / "cache" / "lastfailed"


def result_of(codes: Sequence[int]) -> str:
    """Return one result for the parts of a tier."""
    if not {*codes} <= {0, NO_TESTS}:
        return "FAILED"
    return "passed" if 0 in codes else "no tests"


def retried() -> list[dict[str, str]]:
    entries: list[dict[str, str]] = tomllib.loads(RETRIED.read_text()).get("retried", [])
    return entries


def write(test: str) -> None:
    date, architecture = datetime.now(UTC).date(), platform.machine()
    name = json.dumps(test, ensure_ascii=False)
    with RETRIED.open("a") as file:
        file.write(
            f'\n[[retried]]\ntest = {name}\ndate = {date}\narchitecture = "{architecture}"\nreason = ""\n'
        )


def to_mend() -> list[str]:
    """Return what is wrong with the list itself."""
    tests = [entry["test"] for entry in retried()]
    return [
        *(f"{test} is there twice: mend it" for test in {*tests} if tests.count(test) > 1),
        *(f"{entry['test']} has no reason" for entry in retried() if not entry["reason"]),
    ]
