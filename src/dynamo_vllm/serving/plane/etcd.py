"""A small etcd client over the JSON gateway; the runtime does not share its own client."""

from __future__ import annotations

import base64
import contextlib
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dynamo_vllm.config.planes import EtcdAccess

SECONDS = 3.0
MOST_OPERATIONS = 100
"""Operations in one transaction; etcd accepts 128 by default."""
SHOWN_CHARACTERS = 200
_UNAUTHENTICATED = 401


class EtcdError(Exception):
    """etcd is down, or refused; the message says which."""


class _MemberUnavailable(EtcdError):
    """This member cannot answer, for example without a leader; another may."""


@dataclass(frozen=True, slots=True)
class EtcdLease:
    granted_seconds: int
    keys: frozenset[bytes]


class Etcd:
    """Sends requests to the first endpoint that can answer."""

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self._client = httpx.AsyncClient(verify=_context(access), timeout=SECONDS, trust_env=False)
        self._first = 0
        self._token: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def lease(self, number: int) -> EtcdLease | None:
        """Return the remaining time of a lease; None if etcd does not know it."""
        found = await self._ask("lease/timetolive", {"ID": str(number), "keys": True})
        with _expected_answer(found):
            if int(found.get("TTL", 0)) < 0 or "grantedTTL" not in found:
                return None
            return EtcdLease(
                int(found["grantedTTL"]), frozenset(map(base64.b64decode, found.get("keys", ())))
            )

    async def grant(self, number: int, seconds: int) -> None:
        await self._ask("lease/grant", {"ID": str(number), "TTL": str(seconds)})

    async def revoke(self, number: int) -> None:
        await self._ask("lease/revoke", {"ID": str(number)})

    async def values(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        entries: dict[bytes, bytes] = {}
        for some in _batches([{"requestRange": {"key": _text(key)}} for key in keys]):
            found = await self._ask("kv/txn", {"success": some})
            with _expected_answer(found):
                for kv in (kv for one in found["responses"] for kv in one["response_range"].get("kvs", ())):
                    entries[base64.b64decode(kv["key"])] = base64.b64decode(kv.get("value", ""))
        return entries

    async def below(self, prefix: bytes) -> dict[bytes, bytes]:
        """Return all keys that begin with a prefix, which must not end with 0xff."""
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        found = await self._ask("kv/range", {"key": _text(prefix), "range_end": _text(end)})
        with _expected_answer(found):
            rows = found.get("kvs", ())
            return {base64.b64decode(kv["key"]): base64.b64decode(kv.get("value", "")) for kv in rows}

    async def put(self, entries: Mapping[bytes, bytes], lease: int) -> None:
        operations = [
            {"requestPut": {"key": _text(key), "value": _text(value), "lease": str(lease)}}
            for key, value in entries.items()
        ]
        for some in _batches(operations):
            await self._ask("kv/txn", {"success": some})

    async def delete(self, key: bytes) -> None:
        await self._ask("kv/deleterange", {"key": _text(key)})

    async def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        reasons: list[str] = []
        for endpoint in self._in_turn():
            try:
                return await self._ask_one(endpoint, path, body)
            except (httpx.HTTPError, _MemberUnavailable) as exc:
                reasons.append(f"{endpoint}: {str(exc) or type(exc).__name__}")
                self._first += 1
        raise EtcdError(f"etcd does not answer: {', '.join(reasons)}")

    def _in_turn(self) -> list[str]:
        """Return every endpoint, beginning with the one that answered last."""
        every = self._access.endpoints
        first = self._first % len(every)
        return [*every[first:], *every[:first]]

    async def _ask_one(self, endpoint: str, path: str, body: Mapping[str, object]) -> dict[str, object]:
        answer = await self._post(endpoint, path, body)
        if answer.status_code == _UNAUTHENTICATED or "user name is empty" in answer.text:
            await self._log_in(endpoint)
            answer = await self._post(endpoint, path, body)
        return _read(answer)

    async def _log_in(self, endpoint: str) -> None:
        """Log in again when etcd refuses the token: tokens expire."""
        self._token = None
        body = {"name": self._access.username or "", "password": self._access.password or ""}
        self._token = str(_read(await self._post(endpoint, "auth/authenticate", body)).get("token", ""))

    async def _post(self, endpoint: str, path: str, body: Mapping[str, object]) -> httpx.Response:
        headers = {} if self._token is None else {"Authorization": self._token}
        return await self._client.post(f"{endpoint.rstrip('/')}/v3/{path}", json=body, headers=headers)


@contextlib.contextmanager
def _expected_answer(found: Mapping[str, Any]) -> Iterator[None]:
    """Reject an answer that does not come from etcd, for example from a proxy; it must not end the caller."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        shown = repr(found)[:SHOWN_CHARACTERS]
        raise EtcdError(f"etcd sent an unexpected answer ({type(exc).__name__}): {shown}") from exc


def _read(answer: httpx.Response) -> dict[str, object]:
    try:
        found = answer.json()
    except (ValueError, RecursionError):
        found = None
    reason = found.get("message") or found.get("error") if isinstance(found, dict) else None
    if answer.status_code >= 500:
        raise _MemberUnavailable(f"{answer.status_code} {reason or answer.reason_phrase}")
    if not isinstance(found, dict):
        raise EtcdError(f"etcd answered {answer.status_code} without JSON; is its gRPC gateway switched off?")
    if answer.status_code != 200:
        raise EtcdError(f"etcd refused: {reason or answer.status_code}")
    return found


def _batches(operations: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(operations), MOST_OPERATIONS):
        yield operations[start : start + MOST_OPERATIONS]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _context(access: EtcdAccess) -> ssl.SSLContext | bool:
    if not any(endpoint.startswith("https") for endpoint in access.endpoints):
        return False
    context = ssl.create_default_context(cafile=access.ca)
    if access.cert is not None:
        context.load_cert_chain(access.cert, access.key)
    return context
