"""Defines the types of what `dynamo-vllm status` finds out about a running system."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    ready: bool
    context_length: int | None
    requests: int
    in_flight: int
    errors: int


@dataclass(frozen=True, slots=True)
class Instance:
    id: int
    role: str
    """- if it cannot be derived from the component's name."""
    address: str
    transport: str
    device: str
    kv_index: bool


@dataclass(frozen=True, slots=True)
class Frontend:
    ready: bool
    models: list[ListedModel]
    instances: list[Instance] | None
    """None if the frontend does not list them."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One instance in discovery, and its reply."""

    number: int
    worker: str
    """The short name of its instance."""
    instance: int
    reply: dict[str, Any]
    """Its reply to the verb `status`, or the error of the call."""


@dataclass(frozen=True, slots=True)
class SystemStatus:
    url: str
    place: str
    """The namespace and discovery in which workers were searched."""
    frontend: Frontend | None
    frontend_problem: str | None
    workers: list[Worker]
    workers_problem: str | None

    def builtins(self) -> dict[str, object]:
        """Return the JSON document, with the frontend's fields at the top level."""
        front = asdict(self.frontend or Frontend(False, [], None))
        workers = [{**worker.reply, **_names(worker)} for worker in self.workers]
        problems = {"frontend_problem": self.frontend_problem, "workers_problem": self.workers_problem}
        return {"url": self.url, **front, "workers": workers, **problems}


def _names(worker: Worker) -> dict[str, object]:
    return {"number": worker.number, "worker": worker.worker, "instance": worker.instance}
