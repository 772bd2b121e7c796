"""Scenarios of other users and other machines: files they plant, ports they reach."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.attacks.clients import on_a_host
from faults.deployment import environment, fake_words, left_in, pids, started, stopped
from faults.others import Others, of_fake_engine
from faults.scenario import Run, Scenario, Seen, needs_hosts, needs_root
from harness import listening
from harness.processes import COMMAND, free_port
from harness.served import Serving

NOBODY, OURS = 65534, os.getuid()
PORTS = range(1, 65536)


def as_nobody(act: Callable[[], object]) -> str:
    """Does it as another user, who may not even start our Python; the error, or nothing."""
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.umask(0)
            act()
        except BaseException as exc:
            text = repr(exc)
        os.write(said, text.encode())
        os._exit(0)
    os.close(said)
    with open(heard) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


# --- what another machine can connect to ----------------------------------------------------------------


def sniffing(run: Run) -> Seen:
    serving = run.sites.get(on_a_host)
    before = pids(serving)
    found = listening.listeners([process.pid for process in serving.below()])
    ports = {one.port for one in found}
    assert len(ports) > 5, f"only {ports} listen: is this the deployment?"
    with Others(serving.stack.url, of_fake_engine()) as others:
        opened = open_ports(serving.stack.address, [*PORTS])
        over_ipv6 = open_ports(link_local(serving), sorted(ports))
        others.go_on()
    assert opened == {serving.stack.port}, f"ports {sorted(opened)} can be connected to"
    assert over_ipv6 <= {serving.stack.port}, f"ports {sorted(over_ipv6)} can be connected to over IPv6"
    assert pids(serving) == before
    waited = others.longest_seconds
    return Seen(
        waited,
        f"of 65535 ports 1 can be connected to, the HTTP port, while {len(ports)} listen; over IPv6 "
        f"{len(over_ipv6)}; {others.total} answers right",
    )


def open_ports(address: str, ports: list[int]) -> set[int]:
    """Those that take a connection."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def is_open(port: int) -> bool:
        with socket.socket(family) as caller:
            caller.settimeout(30)
            where = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0][4]
            return caller.connect_ex(where) == 0

    with ThreadPoolExecutor(32) as pool:
        return {port for port, answers in zip(ports, pool.map(is_open, ports), strict=True) if answers}


def link_local(serving: Serving) -> str:
    """The IPv6 address of the deployment's machine, by the device of ours that leads there."""
    namespace = f"/proc/{serving.process.pid}/ns/net"
    shown = subprocess.run(
        ["nsenter", f"--net={namespace}", "ip", "-6", "-o", "address", "show", "dev", "eth0"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    address = re.search(r"inet6 (fe80::[0-9a-f:]+)/", shown)
    assert address is not None, f"no IPv6 address: {shown}"
    return f"{address[1]}%dyn{os.getpid()}"


# --- pipes in the place of files ------------------------------------------------------------------------


def plant_pipes(temporary: Path) -> None:
    """What workers, frontends and `serve` look for there."""
    for name in ("dynamo-vllm-aaaaaaaa", "dynamo-vllm-zzzzzzzz"):
        (temporary / name).mkdir()
        os.mkfifo(temporary / name / "in-use")
        os.mkfifo(temporary / name / "lock")
    (temporary / "dynamo-vllm-linked00").mkdir()
    linked = temporary / "dynamo-vllm-linked00" / "in-use"
    linked.symlink_to(temporary / "dynamo-vllm-aaaaaaaa" / "in-use")
    for name in (f"dynamo-vllm-discovery-{OURS}", f"dynamo-vllm-home-{OURS}", "dynamo_store_kv"):
        os.mkfifo(temporary / name)


def pipes(run: Run) -> Seen:
    """Another user made them before the start; one stands in a folder of our own too."""
    temporary = open_to_all(run.folder / "tmp")
    assert (refused := as_nobody(lambda: plant_pipes(temporary))) == "", refused
    (temporary / "dynamo-vllm-ours0000").mkdir(mode=0o700)
    os.mkfifo(temporary / "dynamo-vllm-ours0000" / "in-use")
    before = fingerprint(temporary)
    began = time.monotonic()
    with started(run.folder, *fake_words(run.model), seconds=120) as serving:
        ready = time.monotonic() - began
        with Others(serving.stack.url, of_fake_engine()) as others:
            others.go_on()
        used = [line for pid in _all_pids(serving) for line in _open_pipes(pid, temporary)]
        assert used == [], f"opened: {used}"
        stopped(serving, signal.SIGTERM)
    assert fingerprint(temporary) == before, "something planted was touched, or something was left"
    said = refusal_of_serve(run, temporary / "planted-run")
    return Seen(
        ready,
        f"ready after {ready:.1f} s; no pipe opened or changed; {others.total} answers right; "
        f"a run folder with a pipe for its note: {said}",
    )


def refusal_of_serve(run: Run, planted: Path) -> str:
    """What `serve` says of a run folder in which somebody put a pipe in the place of its note."""

    def plant() -> None:
        planted.mkdir()
        os.mkfifo(planted / "serve.json")

    assert (refused := as_nobody(plant)) == "", refused
    words = ["serve", "--port", str(free_port()), *fake_words(run.model), "--run-dir", str(planted)]
    line = refused_in_one_line(run, *words)
    assert "has serve.json, which serve did not create" in line, line
    return "refused in one line"


def open_to_all(folder: Path) -> Path:
    """As /tmp is."""
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def fingerprint(folder: Path) -> dict[str, tuple[int, int]]:
    """What is there, and whose."""
    return {str(path): (path.lstat().st_mode, path.lstat().st_uid) for path in sorted(folder.rglob("*"))}


def _all_pids(serving: Serving) -> list[int]:
    return [serving.process.pid, *(process.pid for process in serving.below())]


def _open_pipes(pid: int, below: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(entry.stat().st_mode) and str(entry.readlink()).startswith(str(below)):
                    yield f"{pid}: {entry.readlink()}"


# --- entries in discovery -------------------------------------------------------------------------------


def planted_entries(run: Run) -> Seen:
    """Real entries of a deployment, changed to lead to a trap, in every place that has a known name."""
    temporary = open_to_all(run.folder / "tmp")
    with trap() as trapped:
        entries = changed_entries(run, trapped.port)
        places = [temporary / f"dynamo-vllm-discovery-{OURS}", temporary / "dynamo_store_kv"]
        for place in places:
            planted = as_nobody(functools.partial(shutil.copytree, entries, place))
            assert planted == "", planted
        with started(run.folder, *fake_words(run.model)) as serving:
            refused = as_nobody((run.folder / "run" / "discovery" / "planted").touch)
            assert "PermissionError" in refused, "another user can write into discovery"
            assert len(serving.stack.instances()) == 1, "a planted worker is listed"
            with Others(serving.stack.url, of_fake_engine(4)) as others:
                others.go_on(5)
            said = refusal_of_frontend(run)
            stopped(serving, signal.SIGTERM)
        assert trapped.visitors == 0, f"{trapped.visitors} connections went to the planted address"
    assert left_in(temporary) == [places[0].name]
    return Seen(
        others.longest_seconds,
        f"{others.total} answers right, 0 connections to the planted address; "
        f"a frontend at the default place: {said}",
    )


def changed_entries(run: Run, port: int) -> Path:
    """The discovery files of a deployment that has ended, with another address in them."""
    folder = run.folder / "first"
    folder.mkdir()
    kept = run.folder / "entries"
    with started(folder, *fake_words(run.model)):
        shutil.copytree(folder / "run" / "discovery", kept)
    entries = [path for path in kept.rglob("*") if path.is_file()]
    changed = 0
    for path in entries:
        text, count = re.subn(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", path.read_text())
        path.write_text(text)
        changed += count
    assert changed, "no entry names an address"
    for path in [kept, *kept.rglob("*")]:
        path.chmod(0o777)
    return kept


class Trap:
    """Listens, and counts who comes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.visitors = 0
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()
                self.visitors += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@contextlib.contextmanager
def trap() -> Iterator[Trap]:
    made = Trap()
    try:
        yield made
    finally:
        made.close()


def refusal_of_frontend(run: Run) -> str:
    """What a frontend says that is to look in the default place."""
    line = refused_in_one_line(run, "frontend", "--port", str(free_port()))
    assert "may belong to another user" in line, line
    return "refused in one line"


def refused_in_one_line(run: Run, *words: str) -> str:
    env = environment(run.folder)
    done = subprocess.run(
        [*COMMAND, *words], env=env, capture_output=True, text=True, timeout=60, cwd=run.folder
    )
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0 and len(lines) == 1, f"exit code {done.returncode}: {done.stderr[-300:]}"
    return lines[0]


SCENARIOS = (
    Scenario(
        "sniffing",
        "another machine tries every port, as a reader of events would: only the HTTP port is there",
        sniffing,
        needs_hosts,
    ),
    Scenario(
        "fifo",
        "another user puts pipes where locks and folders will be looked for: no hang, none is used",
        pipes,
        needs_root,
    ),
    Scenario(
        "discovery",
        "another user puts entries of a worker into the default places of discovery: not believed",
        planted_entries,
        needs_root,
    ),
)
