"""Machines for tests: network namespaces with addresses of their own on one switch.

A host is a namespace with `lo` and `eth0`; the switch is another one with a bridge, so that nothing but one
cable enters the test's own namespace. Files are shared by all, as over a network file system.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.waiting import until

IP = shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])) or ""
PREFIX = "dynamo-test"


@functools.cache
def refusal() -> str | None:
    """Why there can be no hosts here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not IP:
        return "needs the command ip (apt install iproute2)"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", "eth1", "netns", name)
        _ip("-n", name, "link", "add", "br0", "type", "bridge")
    except subprocess.CalledProcessError as exc:
        return f"this kernel makes no network namespaces: {exc.stderr.strip()}"
    finally:
        subprocess.run([IP, "netns", "del", name], capture_output=True)
    return None


@dataclass
class Host:
    """One machine."""

    namespace: str
    address: str
    switch: str
    port: str
    """The switch's end of its cable."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command it runs on this host."""
        return (IP, "netns", "exec", self.namespace)

    @property
    def environment(self) -> dict[str, str]:
        """Over the harness' own, which keeps all traffic on loopback: a process finds its address itself."""
        return {"DYN_VLLM_BIND_HOST": ""}

    def ip(self, *args: str) -> None:
        """`ip` on this host."""
        _ip("-n", self.namespace, *args)

    def pull_cable(self) -> None:
        """The interface goes down: sending fails at once."""
        self.ip("link", "set", "eth0", "down")

    def go_silent(self) -> None:
        """The link stays up and carries nothing any more: nobody is told."""
        _ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def restore(self) -> None:
        """After either."""
        self.ip("link", "set", "eth0", "up")
        _ip("-n", self.switch, "link", "set", self.port, "master", "br0")

    def lose(self) -> None:
        """The power goes: silent first, so that no dying process can say goodbye."""
        self.go_silent()
        self.kill_all()

    def kill_all(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(f"an empty {self.namespace}", lambda: not self.pids())

    def pids(self) -> list[int]:
        """Whoever runs there. Zombies have left their namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


@dataclass
class Hosts:
    """Machines a, b, c … and the address by which the test itself is reached."""

    own_address: str
    every: dict[str, Host] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Host:
        return self.every[name]


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Machines of these names while the block runs; then all their processes end."""
    _sweep()
    stem = f"{PREFIX}-{os.getpid()}-{random.randrange(1000)}"
    switch, net, uplink = f"{stem}-switch", _free_net(), f"dyn{os.getpid()}"
    made = Hosts(f"{net}.254")
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            host = Host(f"{stem}-{name}", f"{net}.{number}", switch, f"port{number}")
            _ip("netns", "add", host.namespace)
            made.every[name] = host
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _plug(host.namespace, "eth0", host.address, switch, host.port)
        _plug(None, uplink, made.own_address, switch, "test")
        yield made
    finally:
        for host in made.every.values():
            host.kill_all()
        subprocess.run([IP, "link", "del", uplink], capture_output=True)
        for name in (*(host.namespace for host in made.every.values()), switch):
            subprocess.run([IP, "netns", "del", name], capture_output=True)


def _plug(namespace: str | None, device: str, address: str, switch: str, port: str) -> None:
    """A cable from a host, or from the test's own namespace, to the switch."""
    where = ["-n", namespace] if namespace else []
    _ip(*where, "link", "add", device, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip(*where, "address", "add", f"{address}/24", "dev", device)
    _ip(*where, "link", "set", device, "up")


def _free_net() -> str:
    used = _ip("route", "show", "table", "all")
    free = [f"10.77.{n}" for n in range(256) if f"10.77.{n}." not in used]
    return random.choice(free)


def _sweep() -> None:
    """What a test run that was killed has left."""
    for line in _ip("netns", "list").splitlines():
        name = line.partition(" ")[0]
        if not name.startswith(f"{PREFIX}-") or Path("/proc", name.split("-")[2]).exists():
            continue
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run([IP, "netns", "del", name], capture_output=True)


def _ip(*args: str) -> str:
    return subprocess.run([IP, *args], check=True, capture_output=True, text=True).stdout
