"""Builds errors in the shape of OpenAI's, which Anthropic's SDKs read too if the types are theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}
ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}


class GatewayError(Exception):
    """A request that the gateway itself refuses."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        parameter: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.parameter = parameter
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> bytes:
        return error_body(self.status, self.message, self.code, self.parameter, path)


def error_body(
    status: int, message: str, code: str | None = None, parameter: str | None = None, path: str = ""
) -> bytes:
    """Return the answer to a request for this path; clients of Anthropic's know other types."""
    error: dict[str, Any] = {
        "message": message,
        "type": _type(status, path),
        "param": parameter,
        "code": code,
    }
    return msgspec.json.encode({"type": "error", "error": error})


def _type(status: int, path: str) -> str:
    types = ANTHROPIC_TYPES if path.startswith(ANTHROPIC_PATHS) else TYPES
    return types.get(status, "invalid_request_error" if status < 500 else types[500])
