"""A browser, and the stand-in for the console's server with the committed page."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.browser import ROOT, Opened, opening

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Start the stand-in server and return its URL."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here, which runs the stand-in for the console's server")
    command = [node, str(ROOT / "console" / "dev" / "server.mjs"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
            server.wait(10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    found = [os.environ.get("DYNAMO_VLLM_CHROMIUM"), *map(shutil.which, BROWSERS)]
    executable = next((path for path in found if path), None)
    if executable is None:
        pytest.skip("no Chromium here; apt install chromium, or set DYNAMO_VLLM_CHROMIUM")
    with playwright.sync_playwright() as started:
        # As root, as in many containers, Chromium has no sandbox; it opens only our page.
        running = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Callable[..., Opened]]:
    """Open pages of the stand-in with a width and a colour scheme; they are closed after the test."""
    with opening(browser, address) as new:
        yield new
