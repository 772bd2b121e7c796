"""Describes each role by its properties, so that no other module tests a role's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCard:
    """What a worker, its operators and its peers must know of a role without knowing its name."""

    worker_type: str
    """Aggregated, Prefill, Decode or Encode, as the runtime spells it."""
    process_name: str = "worker"
    """Name of its processes in `serve`; a number follows."""
    component: str = "backend"
    """The runtime component of its workers, unless the user names one."""
    input: str = "Tokens"
    """Tokens, or Text when the engine tokenises."""
    publishes_kv_events: bool = True
    may_migrate: bool = True
    needs: tuple[tuple[str, ...], ...] = ()
    """Worker types that must be present before the model is ready: alternatives, each a set."""
    router: str | None = None
    """How the frontend chooses among workers of this role: kv, round-robin or least-loaded; None is its own
    choice."""
    endpoint_types: tuple[str, ...] | None = None
    """OpenAI endpoints of the role; None takes the worker's option, an empty one is for helpers of others."""
    is_listed: bool = True
    """Whether the frontend sees it; if not, other workers find it by its address."""
    needs_adapters: bool = True
    """Whether a request for an adapter that is not loaded here fails; if not, `prepare` handles it."""
    takes_guides: bool = True
    """Whether it generates text to which structured output applies."""
    kv_role: str = "kv_both"
    """Which side of a KV transfer it is, in vLLM's words: kv_producer, kv_consumer, or kv_both."""
    encodes_media: bool = False
    """Whether it runs only the vision encoder, for workers that answer."""
    kind: str = "generate"
    """What its models do: generate, pooling or transcription."""
    reports_stages: bool = False
    """Whether it reports when a request has arrived and when it is prepared; callers time both."""

    @property
    def gives_kv(self) -> bool:
        """Whether it computes prompts for another worker, which fetches the KV cache."""
        return self.kv_role == "kv_producer"

    @property
    def takes_kv(self) -> bool:
        """Whether it fetches the KV cache of prompts that another worker computed."""
        return self.kv_role == "kv_consumer"

    @property
    def hands_over_kv(self) -> bool:
        """Whether it sends its KV cache to another worker, or receives one."""
        return self.gives_kv or self.takes_kv

    @property
    def keeps_kv(self) -> bool:
        """Whether its engine has KV caches of prompts that come again, which tiers can keep."""
        return self.kind == "generate" and not self.encodes_media

    @property
    def helps_others(self) -> bool:
        """Whether it only helps other workers and answers no client itself."""
        return self.endpoint_types == ()

    @property
    def does_all(self) -> bool:
        """Whether it leaves no part of a request to workers of other roles."""
        return not self.hands_over_kv and not self.encodes_media


CARDS: Mapping[str, RoleCard] = {
    "agg": RoleCard(worker_type="Aggregated"),
    "prefill": RoleCard(
        worker_type="Prefill",
        process_name="prefill",
        component="prefill",
        needs=(("Decode",),),
        may_migrate=False,
        endpoint_types=(),
        needs_adapters=False,
        takes_guides=False,
        kv_role="kv_producer",
    ),
    "decode": RoleCard(
        worker_type="Decode",
        process_name="decode",
        needs=(("Decode",),),
        publishes_kv_events=False,
        kv_role="kv_consumer",
    ),
    "encode": RoleCard(
        worker_type="Encode",
        process_name="encode",
        component="encoder",
        publishes_kv_events=False,
        may_migrate=False,
        endpoint_types=(),
        needs_adapters=False,
        is_listed=False,
        takes_guides=False,
        encodes_media=True,
        reports_stages=True,
    ),
    "pooling": RoleCard(
        worker_type="Aggregated",
        input="Text",
        publishes_kv_events=False,
        may_migrate=False,
        router="least-loaded",
        takes_guides=False,
        kind="pooling",
    ),
    "transcription": RoleCard(
        worker_type="Aggregated",
        input="Text",
        publishes_kv_events=False,
        may_migrate=False,
        router="least-loaded",
        takes_guides=False,
        endpoint_types=("transcriptions",),
        is_listed=False,
        kind="transcription",
    ),
}
"""The roles that --disaggregation-mode names."""
