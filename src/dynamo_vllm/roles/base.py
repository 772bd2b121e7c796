"""What a role decides: how a request becomes a job, and how outputs become chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from dynamo_vllm.job import Adapter, Job, Output
    from dynamo_vllm.roles.trials import Given, Trials
    from dynamo_vllm.wire import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCard:
    """What the worker must know of a role without knowing its name."""

    worker_type: str
    """Aggregated, Prefill, Decode or Encode, as the runtime spells it."""
    input: str = "Tokens"
    """Tokens, or Text when the engine tokenises."""
    publishes_kv_events: bool = True
    may_migrate: bool = True
    needs: tuple[tuple[str, ...], ...] = ()
    """Worker types that must be there before the model is ready: alternatives, each a set."""
    router: str | None = None
    """How the frontend chooses among workers of this role: kv or round-robin; None is its own choice."""
    endpoint_types: tuple[str, ...] | None = None
    """OpenAI endpoints of the role; None takes the worker's option, none are left for a helper of others."""
    is_listed: bool = True
    """Whether the frontend sees it; if not, other workers find it by its address."""
    needs_adapters: bool = True
    """Whether a request for an adapter that is not here fails; if not, `prepare` sees that it got none."""
    takes_guides: bool = True
    """Whether it generates what a schema or a grammar could hold to a form."""
    hands_over_kv: bool = False
    """Whether it gives its KV cache to another worker, or gets it from one."""
    encodes_media: bool = False
    """Whether it runs the encoder alone, for workers that answer."""
    tells_stages: bool = False
    """Whether it says when a request has come and when it is prepared, to one who waits for each apart."""


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
