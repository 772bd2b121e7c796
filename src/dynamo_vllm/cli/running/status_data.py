"""Holds what `dynamo-vllm status` found out about a running system."""

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
    """- where the component's name does not tell."""
    address: str
    transport: str
    device: str
    kv_index: bool


@dataclass(frozen=True, slots=True)
class Frontend:
    ready: bool
    models: list[ListedModel]
    instances: list[Instance] | None
    """None when the frontend does not tell."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One instance in discovery, and what it says of itself."""

    number: int
    worker: str
    """Short for its instance."""
    instance: int
    told: dict[str, Any]
    """Its reply to the verb `status`, or why there is none."""


@dataclass(frozen=True, slots=True)
class SystemStatus:
    url: str
    place: str
    """Where workers were looked for."""
    frontend: Frontend | None
    frontend_problem: str | None
    workers: list[Worker]
    workers_problem: str | None

    def builtins(self) -> dict[str, object]:
        """For other programs; what the frontend tells is at the top."""
        front = asdict(self.frontend or Frontend(False, [], None))
        workers = [{**worker.told, **_names(worker)} for worker in self.workers]
        problems = {"frontend_problem": self.frontend_problem, "workers_problem": self.workers_problem}
        return {"url": self.url, **front, "workers": workers, **problems}


def _names(worker: Worker) -> dict[str, object]:
    return {"number": worker.number, "worker": worker.worker, "instance": worker.instance}
