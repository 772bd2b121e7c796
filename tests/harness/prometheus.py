"""A real Prometheus for a test, and its checker `promtool`.

with prometheus(tmp_path, config) as server:
    server.query('up == 0')
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.processes import free_port
from harness.waiting import until

HOW_TO_GET = "Debian's package `prometheus` has it; .ci/run unpacks it into .venv/prometheus"
UNPACKED = Path(sys.prefix, "prometheus", "usr", "bin")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})


def tool(name: str) -> str:
    """`prometheus` or `promtool`; skips where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"no {name} on this machine: {HOW_TO_GET}")
    return found


def promtool(*words: str) -> str:
    """What it says; fails where it does."""
    done = subprocess.run([tool("promtool"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass
class Prometheus:
    """A running server."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path

    def get(self, path: str, **params: str) -> Any:
        reply = self.client.get(f"/api/v1/{path}", params=params).json()
        assert reply["status"] == "success", (params, reply)
        return reply["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Labels and value of every series in the answer."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def series(self) -> dict[str, list[dict[str, str]]]:
        """The labels of everything it has, by name."""
        found: dict[str, list[dict[str, str]]] = {}
        for labels in self.get("series", **{"match[]": '{__name__!=""}'}):
            found.setdefault(labels["__name__"], []).append(labels)
        return found

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"prometheus ended:\n{self.log.read_text()[-3000:]}")
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/-/ready").status_code == 200
        return False


@contextlib.contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[Prometheus]:
    port = free_port()
    log = folder / "prometheus.log"
    command = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            made = Prometheus(process, client, log)
            until("prometheus ready", made.is_ready)
            yield made
    finally:
        process.kill()
        process.wait(30)


# --- what an expression speaks of --------------------------------------------------------------------------


@dataclass(frozen=True)
class Selected:
    """A metric and the labels that are asked of it."""

    name: str
    matchers: Mapping[str, str]
    """By label: = "x" as it stands, for labels compared with one value; others with an empty one."""


def selected(expression: str) -> list[Selected]:
    """Every metric an expression reads: what is no word, function, duration or list of labels."""
    text = re.sub(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", expression)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    found = []
    for match in re.finditer(r'"[^"]*"|([a-zA-Z_:][\w:]*)\s*(\{[^}]*\}|\()?', text):
        name, behind = match.group(1), match.group(2) or ""
        if name and behind != "(" and name.lower() not in _WORDS:
            found.append(Selected(name, dict(_matchers(behind))))
    return found


def _matchers(braces: str) -> Iterator[tuple[str, str]]:
    for label, sign, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', braces):
        yield label, value if sign == "=" else ""


def labels_named(expression: str) -> set[str]:
    """The labels of its `by` and `on` lists."""
    lists = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", expression)
    return {label.strip() for text in lists for label in text.split(",") if label.strip()}
