"""Does what an operator asks for on the page: the verbs of the command line, with the same words for what
was done.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.observe import verbs, worker_names
from dynamo_vllm.supervise.control import client, words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_vllm.supervise.run_folder import RunFolder

    Result = dict[str, Any]

OF_WORKERS = (
    *("load_lora", "unload_lora", "sleep", "wake_up", "pause", "resume"),
    *("clear_kv_blocks", "reset_caches", "prove_tiers"),
)
"""The admin verbs that the page offers; workers check their bodies and states."""


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to do something."""

    worker: str | None = None
    """The id of one; None is all."""
    group: str | None = None
    """A group of workers, for what `serve` does."""
    body: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Order:
    """What the supervisor of a `serve` does on a verb."""

    request: Callable[[str | None, Asked], dict[str, Any]]
    """Make the request for its control socket, from the name of a process and what was asked for."""
    words: Callable[[dict[str, Any]], str]


def _restart(process: str | None, asked: Asked) -> dict[str, Any]:
    process = _known(process, asked)
    if process == "console":
        raise ConsoleError(400, "the console cannot restart itself", "use 'dynamo-vllm restart console'")
    return {"verb": "restart", "name": process, **_seconds(asked)}


def _drain(process: str | None, asked: Asked) -> dict[str, Any]:
    return {"verb": "drain", "name": _known(process, asked), **_seconds(asked)}


def _known(process: str | None, asked: Asked) -> str:
    if process is None:
        raise ConsoleError(404, f"{asked.worker!r} is no process of this serve", "choose one of the overview")
    return process


def _scale(_: str | None, asked: Asked) -> dict[str, Any]:
    count = asked.body.get("workers")
    if asked.group is None or not isinstance(count, int) or isinstance(count, bool):
        raise ConsoleError(400, "give a group and the number of its workers")
    return {"verb": "scale", "group": asked.group, "workers": count, **_seconds(asked)}


def _seconds(asked: Asked) -> dict[str, Any]:
    seconds = asked.body.get("drain_seconds")
    return {} if seconds is None else {"drain_seconds": seconds}


OF_SERVE = {
    "restart": Order(_restart, words.restarted),
    "drain": Order(_drain, words.drained),
    "scale": Order(_scale, words.scaled),
}
"""What the supervisor of a `serve` on this machine does."""


class Workers(Protocol):
    """The part of the admin client that is used here."""

    @property
    def found(self) -> list[int]: ...

    async def ask(
        self, instance: int, verb: str, body: Mapping[str, Any] | None = None, seconds: float | None = None
    ) -> dict[str, Any]: ...


class GatewayVerbs(Protocol):
    """What an operator does with keys; None without a gateway."""

    @property
    def names(self) -> tuple[str, ...]: ...

    async def perform(self, verb: str, body: dict[str, Any]) -> Result: ...


class Actions:
    """All that can be done, and the doing."""

    def __init__(
        self,
        workers: Workers,
        folder: RunFolder | None,
        gateway: GatewayVerbs | None,
        *,
        process_of: Callable[[str], str | None],
        read_only: bool,
        on_done: Callable[[dict[str, Any]], None],
    ) -> None:
        """`process_of` returns the process of `serve` that a worker's id, or its own name, means."""
        self._workers = workers
        self._folder = folder
        self._gateway = gateway
        self._process_of = process_of
        self._read_only = read_only
        self._on_done = on_done

    @property
    def names(self) -> list[str]:
        """The verbs that work here."""
        if self._read_only:
            return []
        has_control = self._folder is not None and self._folder.control is not None
        of_serve = OF_SERVE if has_control else ()
        return [*OF_WORKERS, *of_serve, *(self._gateway.names if self._gateway else ())]

    async def perform(self, verb: str, asked: Asked) -> dict[str, Any]:
        self.refuse_if_read_only()
        if verb not in self.names:
            raise ConsoleError(404, f"{verb!r} cannot be done here", f"there are {', '.join(self.names)}")
        results = await self._results(verb, asked)
        # Replies may have a secret, which is for the one who asked.
        public = [{name: value for name, value in one.items() if name != "reply"} for one in results]
        self._on_done({"at": round(time.time(), 3), "verb": verb, "results": public})
        return {"results": results}

    def refuse_if_read_only(self) -> None:
        if self._read_only:
            raise ConsoleError(
                403,
                "this console is read-only",
                "start it without --console-read-only, or use the command line",
            )

    async def _results(self, verb: str, asked: Asked) -> list[Result]:
        if self._gateway is not None and verb in self._gateway.names:
            return [await self._gateway.perform(verb, asked.body)]
        refuse_bad_body(verb, asked.body)
        if verb in OF_SERVE:
            return [await self._ask_serve(OF_SERVE[verb], asked)]
        found = self._workers.found
        if not found:
            raise ConsoleError(409, "there are no workers", "start one")
        try:
            chosen = found if asked.worker is None else [worker_names.pick(found, asked.worker)]
        except DynamoVllmError as exc:
            raise ConsoleError(404, str(exc).removeprefix("--")) from None
        names = worker_names.short(found)
        seconds = verbs.seconds_for(verb, asked.body)
        replies = await asyncio.gather(*(self._workers.ask(i, verb, asked.body, seconds) for i in chosen))
        return [result(names[i], verb, reply) for i, reply in zip(chosen, replies, strict=True)]

    async def _ask_serve(self, order: Order, asked: Asked) -> Result:
        process = None if asked.worker is None else self._process_of(asked.worker)
        request = order.request(process, asked)
        control = None if self._folder is None else self._folder.control
        if control is None:
            raise ConsoleError(409, "serve takes no orders", "see its log")
        who = process or asked.group
        try:
            done = await client.ask(control, request)
        except DynamoVllmError as exc:
            return {"worker": who, "ok": False, "said": str(exc), "reply": {}}
        said = order.words(done).removeprefix(f"{who}: ")  # the page names it
        return {"worker": who, "ok": True, "said": said, "reply": done}


def result(worker: str | None, verb: str, reply: dict[str, Any]) -> Result:
    is_ok = reply.get("status") == "success"
    return {"worker": worker, "ok": is_ok, "said": verbs.said(verb, reply), "reply": reply}


def refuse_bad_body(verb: str, body: Mapping[str, Any]) -> None:
    """Raise for a relative path, which each worker would look for where it happens to run, or a bad time."""
    source = body.get("source") if verb == "load_lora" else None
    uri = source.get("uri") if isinstance(source, dict) else None
    if isinstance(uri, str) and "://" not in uri and not uri.startswith("/"):
        raise ConsoleError(
            400, f"{uri!r} is not a whole path", "give the whole path of a folder, or file://, hf:// or s3://"
        )
    drain = body.get("drain_seconds")
    if drain is not None and not (isinstance(drain, int | float) and 0 <= drain <= 86400):
        raise ConsoleError(400, f"drain_seconds {drain!r} is no number of seconds")
