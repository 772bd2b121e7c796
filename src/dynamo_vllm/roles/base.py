"""Defines a role: how a request becomes a job, and how outputs become chunks."""

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
    """Worker types that must be present before the model is ready: alternatives, each a set."""
    router: str | None = None
    """How the frontend chooses among workers of this role: kv or round-robin; None is the
    frontend's choice.
    """
    endpoint_types: tuple[str, ...] | None = None
    """OpenAI endpoints of the role; None takes the worker's option, an empty one is for helpers of other
    workers."""
    is_listed: bool = True
    """Whether the frontend sees it; if not, other workers find it by its address."""
    needs_adapters: bool = True
    """Whether a request for an adapter that is not loaded here fails; if not, `prepare` handles it."""
    takes_guides: bool = True
    """Whether it generates text to which structured output applies."""
    hands_over_kv: bool = False
    """Whether it sends its KV cache to another worker, or receives one."""
    encodes_media: bool = False
    """Whether it runs only the vision encoder, for workers that answer."""
    tells_stages: bool = False
    """Whether it reports when a request has arrived and when it is prepared, for a caller with a timeout for
    each."""


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

    def trials(self, given: Given) -> Trials:
        """Return requests of every kind for which an engine builds something on first use."""
