"""Defines a role: how a request becomes a job, and how outputs become chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.job import Adapter, Job, Output
    from dynamo_vllm.roles.trials import TrialInputs, Trials
    from dynamo_vllm.wire import Chunk


class Encoder(Protocol):
    def encode(self, output: Output) -> Chunk: ...


RequestT = TypeVar("RequestT")


class Role(Protocol[RequestT]):
    @property
    def card(self) -> RoleCard: ...

    def parse(self, raw: object) -> RequestT:
        """Return the request as a struct; raises InvalidRequest."""

    def adapter(self, request: RequestT) -> str | None:
        """Return the name of the LoRA adapter of the request."""

    async def prepare(self, request: RequestT, job_id: str, adapter: Adapter | None = None) -> Job:
        """Refuse everything that can be refused, before the engine sees the job."""

    def encoder(self, request: RequestT, job: Job) -> Encoder: ...

    def health_check(self) -> dict[str, object]:
        """Return the smallest request of this role, in the form `parse` accepts."""

    def trials(self, given: TrialInputs) -> Trials:
        """Return requests of every kind for which an engine builds something on first use."""
