"""Marks every test with the tier whose folder it lies in, and gives it that tier's time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SECONDS = {"runtime": 240, "contract": 300, "cpu": 600, "e2e": 600, "bare": 600, "console": 300}
"""How long a test may take, with the start of what it shares with others: ends what hangs, nothing else."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts us in the background passes this on, and commands under test could not be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so does nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# httpx reads all authorities it could trust for each client, so for each `httpx.get`: 50 ms of a processor.
# Tests speak plain HTTP on this machine or bring a certificate of their own; this folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(TESTS)


@pytest.fixture(scope="session", autouse=True)
def planes_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Real servers for the whole run, where the environment names planes that need some."""
    if "DYNAMO_VLLM_TEST_PLANES" not in os.environ:
        yield
        return
    from harness.planes import chosen

    with chosen(tmp_path_factory.mktemp("planes")):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS):  # those of a package beside us have none
            tier = item.path.relative_to(TESTS).parts[0]
            item.add_marker(tier)
            if tier in SECONDS and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(SECONDS[tier]))


def pytest_unconfigure() -> None:
    """Close the ports that this process has reserved for its life: Python would warn of each of them."""
    for module, name in (("dynamo_vllm.ports", "_kept"), ("harness.processes", "_reserved")):
        reserved = getattr(sys.modules.get(module), name, [])
        while reserved:
            reserved.pop().close()
