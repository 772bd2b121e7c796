"""Says which models a deployment has and what each is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynamo_vllm.observe.status_data import Worker
    from dynamo_vllm.serving.calls.card import WorkerCard

    Model = dict[str, Any]

CHAT = "chat"
KINDS = (
    ("transcriptions", "transcription"),
    ("images", "image"),
    ("videos", "image"),
    ("chat", CHAT),
    ("completions", "completions"),
    ("embeddings", "embeddings"),
    ("rerank", "rerank"),
    ("score", "rerank"),
)
"""What a model is for, by the first of these types of endpoints that it has."""


def described(
    listed: Iterable[dict[str, Any]], cards: Sequence[WorkerCard], workers: Sequence[Worker]
) -> list[Model]:
    """Return the models that frontends list, and those that only workers name, with what workers say: by
    name, adapters after their base.
    """
    windows = {str(entry["id"]): entry.get("context_window") for entry in listed}
    hidden = [name for card in cards if card.kind == "transcription" for name in card.models]
    bases = _adapters(workers)
    found = [_model(name, windows.get(name), cards, bases) for name in {*windows, *hidden}]
    return sorted(found, key=_place)


def _place(model: Model) -> tuple[str, bool, str]:
    base = model["adapter_of"]
    return base or model["name"], base is not None, model["name"]


def _model(name: str, window: int | None, cards: Sequence[WorkerCard], bases: dict[str, str]) -> Model:
    mine = [card for card in cards if name in card.models]
    apis = {api for card in mine for api in card.apis}
    longest = max((card.max_model_len for card in mine), default=None)
    return {
        "name": name,
        "kind": next((kind for api, kind in KINDS if api in apis), CHAT),
        "adapter_of": bases.get(name),
        "context": window or longest,
    }


def _adapters(workers: Sequence[Worker]) -> dict[str, str]:
    """Return the base model of each adapter."""
    found = {}
    for worker in workers:
        models = worker.reply.get("models") or ["?"]
        for adapter in worker.reply.get("adapters") or ():
            found[str(adapter.get("name"))] = str(models[0])
    return found
