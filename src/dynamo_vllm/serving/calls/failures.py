"""Reads what the runtime raises when a called worker refuses, fails or is lost."""

from __future__ import annotations

import re

import msgspec


class CallFailed(Exception):
    """A call without an answer; `status` is as in HTTP."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter


class WorkerLost(CallFailed):
    """The worker cannot be reached, or is leaving: another one may answer."""


class _Refusal(msgspec.Struct):
    message: str
    code: int


# Runtime 1.6.1: `NotFound: {"message":"…","code":404}`, `Unavailable: …`, `InvalidRequest: …`.
_WORDS = re.compile(r"(\w+): (.*)", re.DOTALL)
_LOST = ("Unavailable", "CannotConnect", "Disconnected", "ConnectionTimeout")
_FIELD = re.compile(r"([a-z_]\w*(?:\[\d+\])?(?:\.\w+)*): ")
"""The field that a worker's message begins with; see errors.RequestError."""
_TOO_MANY_BITS = "invalid type: integer"
_TOO_LARGE = "payload is too large"


def read(exc: Exception) -> CallFailed:
    """Return the failure that an exception of the runtime stands for."""
    text = str(exc) or type(exc).__name__
    if type(exc).__name__ == "InvalidArgument":
        return _refused(400, text)
    if isinstance(exc, UnicodeEncodeError):
        return CallFailed(400, "a text has half a character (a lone surrogate)")
    if text.startswith(_TOO_MANY_BITS):
        return CallFailed(400, "a number has more than 64 bits")
    said = _WORDS.fullmatch(text)
    kind, rest = said.groups() if said is not None else ("", text)
    if rest.startswith("{"):
        try:
            refusal = msgspec.json.decode(rest, type=_Refusal)
            return _refused(refusal.code if 400 <= refusal.code < 600 else 500, refusal.message)
        except msgspec.DecodeError:
            return CallFailed(502, "the worker failed")
    if _TOO_LARGE in rest:
        return CallFailed(413, "the request is too large for this deployment")
    if kind in _LOST:
        return WorkerLost(503, "no worker could answer; try again")
    return CallFailed(500, "the worker failed")


def _refused(status: int, message: str) -> CallFailed:
    field = _FIELD.match(message) if status < 500 else None
    return CallFailed(status, message, field[1] if field else None)
