"""Reads texts for scores and rankings as the clients of several libraries send them."""

from __future__ import annotations

from dynamo_vllm.gateway.replies import GatewayError


def one_text(value: object, where: str) -> str:
    """Return a text that is given as such, or as {"text": …}."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        value = value["text"]
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        raise GatewayError(400, f'{where} has no text; give a text or {{"text": …}}', parameter=where)
    raise GatewayError(400, f'{where} is no text; give a text or {{"text": …}}', parameter=where)


def several_texts(value: object, where: str) -> list[str]:
    """Return a list of texts; one alone is a list too."""
    if not isinstance(value, list):
        return [one_text(value, where)]
    if not value:
        raise GatewayError(400, f"{where} is empty", parameter=where)
    return [one_text(one, f"{where}[{number}]") for number, one in enumerate(value)]
