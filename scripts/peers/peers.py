"""Defines the peers: what each starts, when it is ready, and which of its processes are watched.

All get the same engine flags and variables. Ours and upstream publish KV events, as a deployment with a KV
router does; `vllm serve` and bare AsyncLLM have nobody to publish to. Routers: ours has its default (kv),
`upstream` its own default (round-robin), `upstream-kv` the same as ours. Migration is at its default too
(ours 3, upstream 0). Upstream 1.6.1 names vLLM 0.31 in its `vllm` extra; here it runs on that of all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import processes
from harness.processes import Started
from peers import observe
from peers.environments import Environments, NotHere
from peers.settings import MODEL_NAME, Setting

STOP_SECONDS = 10
"""An engine core may outlive its parent; not for longer than this."""
FIRST_TOKENS = {"model": MODEL_NAME, "prompt": [200, 201, 202], "max_tokens": 1, "temperature": 0}
NO_PLUGINS = {"VLLM_PLUGINS": ""}
"""Ours registers a plugin in every vLLM of the environment; the others run without it."""
NO_CONSOLE = {"DYN_VLLM_CONSOLE": "0"}
"""No other server has such a process, and earlier figures are without it."""


@dataclass(frozen=True)
class Part:
    """One process that a peer is made of."""

    label: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """The settings of the place where a peer runs."""

    python: str
    setting: Setting
    folder: Path
    port: int

    @property
    def engine_flags(self) -> tuple[str, ...]:
        return ("--model", str(self.setting.model), "--served-model-name", MODEL_NAME, *self.setting.flags)


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    parts: Callable[[Place], tuple[Part, ...]]
    main: str
    """Label of the Python process between the engine and the client, whose CPU per token is compared."""
    below: tuple[tuple[str, str, str], ...] = (("engine", "", "EngineCore"),)
    """Processes below a part: the label to watch one under, the part ("" is the last), a word in its name."""
    environment: str = "own"
    needs: Callable[[], None] = lambda: None
    health: str = "/v1/models"


@dataclass
class Server:
    """A peer that is up."""

    peer: Peer
    url: str
    parts: list[Started]
    commands: list[str]
    start_seconds: float
    watched: dict[str, int] = field(default_factory=dict)
    idle_cores: float = 0.0

    def stop(self) -> None:
        processes.stop(self.parts, STOP_SECONDS)


# -- the peers ---------------------------------------------------------------------------------------


def ours(place: Place, *more: str) -> tuple[Part, ...]:
    command = (place.python, "-m", "dynamo_vllm.cli.main")
    return (
        Part("frontend", (*command, "frontend", "--port", str(place.port))),
        Part("worker", (*command, "worker", *place.engine_flags, *more)),
    )


def ours_without_events(place: Place) -> tuple[Part, ...]:
    return ours(place, "--no-kv-events")


def our_serve(place: Place) -> tuple[Part, ...]:
    """Return the one command that a user types, for the cold start."""
    command = (place.python, "-m", "dynamo_vllm.cli.main", "serve", *place.engine_flags)
    command = (*command, "--port", str(place.port), "--run-dir", str(place.folder / "run"))
    return (Part("serve", command, NO_CONSOLE),)


def vllm_serve(place: Place) -> tuple[Part, ...]:
    # What `vllm serve` runs; the command itself asks for the metadata of a distribution named vllm.
    command = (place.python, "-m", "vllm.entrypoints.openai.api_server", *place.engine_flags)
    return (Part("api", (*command, "--host", "127.0.0.1", "--port", str(place.port)), NO_PLUGINS),)


def vllm_rust(place: Place) -> tuple[Part, ...]:
    command = (place.python, "-m", "vllm.entrypoints.cli.main", "serve", *place.engine_flags)
    variables = NO_PLUGINS | {"VLLM_USE_RUST_FRONTEND": "1"}
    return (Part("manager", (*command, "--host", "127.0.0.1", "--port", str(place.port)), variables),)


def upstream(place: Place, *router: str) -> tuple[Part, ...]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": f"tcp://*:{processes.free_port()}",
    }
    frontend = ("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(place.port), *router)
    worker = ("-m", "dynamo.vllm", *place.engine_flags, "--kv-events-config", json.dumps(events))
    return (
        Part("frontend", (place.python, *frontend)),
        Part("worker", (place.python, *worker), NO_PLUGINS),
    )


def upstream_kv(place: Place) -> tuple[Part, ...]:
    return upstream(place, "--router-mode", "kv", "--kv-cache-block-size", str(place.setting.block_size))


def sglang(place: Place) -> tuple[Part, ...]:
    """SGLang has flags of its own; these say the same as the engine flags of the others."""
    command = (
        *(place.python, "-m", "sglang.launch_server", "--model-path", str(place.setting.model)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(place.port)),
        *("--device", "cpu", "--dtype", "float32", "--context-length", "2048"),
        *("--max-running-requests", "256", "--disable-cuda-graph", "--page-size", "32"),
    )
    return (Part("api", command, {"SGLANG_USE_CPU_ENGINE": "1"}),)


def has_rust_front_end() -> None:
    """Raise NotHere unless vLLM's wheel carries it; a file made by unpacking may have lost its x bit."""
    spec = importlib.util.find_spec("vllm")
    binary = Path((spec.origin if spec else None) or "vllm").with_name("vllm-rs")
    if not binary.exists():
        raise NotHere("this build of vLLM has no vllm/vllm-rs")
    if not os.access(binary, os.X_OK):
        with contextlib.suppress(OSError):
            binary.chmod(binary.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    if not os.access(binary, os.X_OK):
        raise NotHere(f"{binary} cannot be executed; run chmod +x on it")


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "dynamo-vllm frontend + worker", ours, "worker"),
        Peer("ours-no-events", "dynamo-vllm, KV events off", ours_without_events, "worker"),
        Peer("vllm", "`vllm serve`", vllm_serve, "api"),
        Peer(
            "vllm-rust",
            "`vllm serve`, Rust front end",
            vllm_rust,
            "api",
            below=(("api", "", "vllm-rs"), ("engine", "", "EngineCore")),
            needs=has_rust_front_end,
        ),
        Peer("upstream", "upstream frontend + worker", upstream, "worker", environment="upstream"),
        Peer("upstream-kv", "upstream, KV router", upstream_kv, "worker", environment="upstream"),
        Peer("sglang", "SGLang", sglang, "api", below=(("engine", "", "scheduler"),), environment="sglang"),
    )
}
COLD = {
    "ours": Peer("ours", "`dynamo-vllm serve`", our_serve, "serve", below=()),
    "vllm": Peer("vllm", "`vllm serve`", vllm_serve, "api", below=()),
}


# -- starting one ------------------------------------------------------------------------------------


def start(peer: Peer, setting: Setting, environments: Environments, folder: Path) -> Server:
    """Start a peer and wait until it answers; raises NotHere or StartFailed with the reason."""
    peer.needs()
    python = environments.python(peer.environment)
    place = Place(python, setting, folder, processes.free_port())
    parts = peer.parts(place)
    (folder / "discovery").mkdir(parents=True, exist_ok=True)
    env = setting.environment() | {"DYN_FILE_KV": str(folder / "discovery")}
    began = time.monotonic()
    running: list[Started] = []
    url = f"http://127.0.0.1:{place.port}"
    try:
        for part in parts:
            log = folder / f"{part.label}.log"
            running.append(processes.start(part.label, part.command, log, env | part.variables))
        wait_for_answer(peer.title, url, running, setting.start_seconds)
        seconds = time.monotonic() - began
        return Server(peer, url, running, [show(p) for p in parts], seconds, watched(peer, running))
    except BaseException:
        processes.stop(running, STOP_SECONDS)
        raise


def wait_for_answer(title: str, url: str, running: list[Started], seconds: float, pause: float = 0.2) -> None:
    """Ready is what a client sees: the model is listed and a first token comes back."""

    def lists_model() -> bool:
        listed = observe.ask(f"{url}/v1/models", seconds=5)
        return bool(listed and listed.get("data"))

    def answers() -> bool:
        answer = observe.ask(f"{url}/v1/completions", FIRST_TOKENS)
        return bool(answer and answer.get("choices"))

    processes.wait_until(f"{title} to list its model", running, lists_model, seconds, pause)
    processes.wait_until(f"{title} to answer", running, answers, 60, pause)


def watched(peer: Peer, running: list[Started]) -> dict[str, int]:
    found = {process.name: process.pid for process in running}
    for label, above, word in peer.below:
        parent = next((p for p in running if p.name == above), running[-1])
        if (pid := observe.find_below(parent, [word])) is not None:
            found[label] = pid
    return found


def show(part: Part) -> str:
    """Return the command as a user would type it, without the folders of this machine."""
    words = ["python" if index == 0 else word for index, word in enumerate(part.command)]
    variables = [f"{name}={value}" for name, value in part.variables.items() if value]
    shown = [Path(w).name if w.startswith("/") else f"'{w}'" if " " in w or "{" in w else w for w in words]
    return " ".join([*variables, *shown])
