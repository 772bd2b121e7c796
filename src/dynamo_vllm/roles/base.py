"""What a role decides: how a request becomes a job, and how outputs become chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.job import Adapter, Job, Output
    from dynamo_vllm.roles.trials import Given, Trials
    from dynamo_vllm.wire import Chunk


class Encoder(Protocol):
    def encode(self, output: Output) -> Chunk: ...


RequestT = TypeVar("RequestT")


class Role(Protocol[RequestT]):
    @property
    def card(self) -> RoleCard: ...

    def parse(self, raw: object) -> RequestT:
        """The request as a struct; raises InvalidRequest."""

    def adapter(self, request: RequestT) -> str | None:
        """The name of the LoRA adapter the request asks for."""

    async def prepare(self, request: RequestT, job_id: str, adapter: Adapter | None = None) -> Job:
        """Everything that can be refused is refused here, before the engine sees the job."""

    def encoder(self, request: RequestT, job: Job) -> Encoder: ...

    def health_check(self) -> dict[str, object]:
        """The smallest request of this role, in the shape `parse` takes."""

    def trials(self, given: Given) -> Trials:
        """Requests of every kind that has something to build the first time."""
