"""Reads in a JSON body what decides about a request; a body that cannot be read goes no further.

Envoy shows each JSON body to the control app as a whole. Its own reader of JSON (1.40) needs 90 times the
size of a body and holds up all requests of its thread for seconds; this one only passes over the fields that
it does not know.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Raw

from dynamo_vllm.gateway.body_parts import refuse_many_parts
from dynamo_vllm.gateway.envoy.routes import PAST_FRONTEND, STATELESS
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")
PINS = (
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "routing_constraints",
    "metadata_upload",
    "router",
)
"""Fields of `nvext` with which a request chooses its worker, or makes the frontend send data elsewhere."""
PAST_FRONTEND_FIELDS = (
    *("messages", "chat_template_kwargs", "truncate_prompt_tokens", "truncation_side", "add_special_tokens"),
    "use_activation",
)
"""Fields of /v1/embeddings that a worker takes and the frontend (1.6.1) drops, or refuses."""
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
LONGEST_MODEL = 4096
LONGEST_ESCAPE = len("\\u0000")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_MISSING = Raw(b"")
_NULL = (b"", b"null")


class _Fields(msgspec.Struct):
    """Raw, so that a field of the wrong type costs no memory."""

    model: Raw = _MISSING
    nvext: Raw = _MISSING
    store: Raw = _MISSING
    previous_response_id: Raw = _MISSING
    background: Raw = _MISSING


def _presence(name: str, fields: Iterable[str]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, [(field, Raw, _MISSING) for field in fields])


AGENT_HINTS, SPECULATIVE_PREFILL = "agent_hints", "speculative_prefill"
"""With it the frontend sends a second request to a worker, which no limit holds for and nobody counts."""
_Nvext = _presence("_Nvext", (*PINS, AGENT_HINTS))
_AgentHints = _presence("_AgentHints", (SPECULATIVE_PREFILL,))
_PastFrontend = _presence("_PastFrontend", PAST_FRONTEND_FIELDS)


def read(path: str, body: bytes) -> tuple[str, str]:
    """Return the model, and which of the path's routes the body is for; both may be empty.

    Raise GatewayError for a body that is no JSON object, or asks for what no client may have.
    """
    refuse_many_parts(body)
    fields = _decoded(body, _Fields)
    _check_nvext(bytes(fields.nvext))
    return _model(bytes(fields.model)), _choice(path, body, fields)


def check_nvext(body: bytes) -> None:
    """Refuse a request that chooses its worker, or makes the frontend send data elsewhere."""
    refuse_many_parts(body)
    _check_nvext(bytes(_decoded(body, _Fields).nvext))


def _check_nvext(nvext: bytes) -> None:
    if nvext in _NULL:
        return
    fields = _object("nvext", nvext, _Nvext)
    for name in PINS:
        if bytes(getattr(fields, name)):
            raise _unsupported(f"nvext.{name}")
    where = f"nvext.{AGENT_HINTS}"
    hints = bytes(getattr(fields, AGENT_HINTS))
    if hints in _NULL:
        return
    prefill = bytes(getattr(_object(where, hints, _AgentHints), SPECULATIVE_PREFILL))
    if prefill not in (*_NULL, b"false"):
        raise _unsupported(f"{where}.{SPECULATIVE_PREFILL}")


def _object(name: str, text: bytes, kind: type[T]) -> T:
    if not text.startswith(b"{"):  # the frontend takes a list for an object without names
        raise GatewayError(400, f"{name} is an object, or left out", parameter=name)
    return _decoded(text, kind)


def _unsupported(name: str) -> GatewayError:
    return GatewayError(
        400,
        f"{name} cannot be used through the gateway; leave it out",
        parameter=name,
        code="unsupported_parameter",
    )


def _model(model: bytes) -> str:
    if not model.startswith(b'"'):
        return ""
    name = _decoded(model, str) if len(model) <= LONGEST_ESCAPE * LONGEST_MODEL + 2 else None
    if name is None or len(name) > LONGEST_MODEL:
        message = f"the name of a model has at most {LONGEST_MODEL} characters"
        raise GatewayError(400, message, parameter="model")
    if _CONTROL_CHARACTER.search(name):
        raise GatewayError(400, f"model {name!r} has a control character in it", parameter="model")
    return name


def _choice(path: str, body: bytes, fields: _Fields) -> str:
    if path == EMBEDDINGS:
        past_frontend = _decoded(body, _PastFrontend)
        is_past = any(bytes(getattr(past_frontend, name)) for name in PAST_FRONTEND_FIELDS)
        return PAST_FRONTEND if is_past else ""
    if path == RESPONSES:
        is_waited_for = bytes(fields.background) != b"true"
        has_no_history = bytes(fields.previous_response_id) in _NULL
        return STATELESS if is_waited_for and has_no_history and bytes(fields.store) == b"false" else ""
    return ""


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise GatewayError(400, f"the body is not a JSON object: {exc}") from None
