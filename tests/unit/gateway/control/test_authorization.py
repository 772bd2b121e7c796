"""What the control app answers to Envoy's two questions, with a real ring of keys and real limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dynamo_vllm.gateway import cost, identity
from dynamo_vllm.gateway.control import capacity
from dynamo_vllm.gateway.control.authorization import BODY_BYTES, Authorizer, Question
from dynamo_vllm.gateway.control.pending_bodies import MOST_BYTES
from dynamo_vllm.gateway.control.web_pages import WebPages
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.envoy import routes
from dynamo_vllm.gateway.fairness import FairShares
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.key_ring import KeyRing
from dynamo_vllm.gateway.store.keys import Limits, Scopes
from dynamo_vllm.gateway.store.limits import Limiter
from harness.refusals import refused

CHAT, COMPLETIONS, REALTIME = "/v1/chat/completions", "/v1/completions", "/v1/realtime"
FORM = "multipart/form-data; boundary=x"
JSON = "application/json"


async def stays() -> None:
    """The client waits for its answer."""
    await asyncio.Event().wait()


@dataclass
class Checks:
    """An authorizer with its parts, and requests of one key."""

    database: Database
    ring: KeyRing
    limits: Limiter
    shares: FairShares
    authorizer: Authorizer
    headers: dict[str, str] = field(default_factory=dict)

    async def use_key(self, **settings: Any) -> None:
        _, secret = self.database.run_now(keys.create("somebody", **settings))
        await self.ring.refresh()
        self.headers = {"x-api-key": secret}

    async def key(
        self, path: str = CHAT, method: str = "POST", query: str = "", **headers: str
    ) -> dict[str, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        question = Question(method, path, query, {"content-type": JSON, **self.headers, **named})
        return await self.authorizer.check_key(question, stays)

    async def body(self, passed: dict[str, str], body: bytes = b"{}", path: str = CHAT) -> dict[str, str]:
        return await self.authorizer.check_body(path, passed, body, stays)

    def reserved(self) -> list[tuple[Any, ...]]:
        """Tokens and running requests of each subject."""
        return self.database.run_now(lambda t: t.all("SELECT day_tokens, running FROM gateway_counters"))


@pytest.fixture
async def checks(database: Database) -> Checks:
    ring, limits, shares = KeyRing(database), Limiter(database, "here"), FairShares()
    return Checks(database, ring, limits, shares, Authorizer(ring, limits, shares, "l", share_cache=False))


@pytest.fixture
async def open_checks(checks: Checks) -> Checks:
    ring = KeyRing(checks.database, is_open=True)
    pages = WebPages("127.0.0.1", ("https://page.example",))
    authorizer = Authorizer(ring, checks.limits, checks.shares, "l", share_cache=True, web_pages=pages)
    return replace(checks, ring=ring, authorizer=authorizer)


# --- what a request may be --------------------------------------------------------------------------------

JSON_TYPES = (
    *(JSON, "application/json; charset=utf-8", "application/json;charset=UTF-8", "APPLICATION/JSON"),
    *("application/x+json", "application/vnd.api+json; v=1", "application/json ;x"),
)
OTHER_TYPES = (
    *("", "text/plain", "text/plain; application/json", "application/jsonx", "application/ndjson"),
    *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/+json"),
    *("application/json,text/plain", "application/\u0131json", "x application/json", "application/json\n"),
)


async def test_json_has_many_spellings_and_what_is_none_is_refused_before_its_body(checks: Checks) -> None:
    await checks.use_key()
    for content_type in JSON_TYPES:
        passed = await checks.key(content_type=content_type)
        assert identity.KEY in passed, content_type
        checks.authorizer.ended(passed[identity.REQUEST])
    for path in (CHAT, "/v1/batches", "/v1/responses", "/tokenize"):
        for content_type in OTHER_TYPES:
            with refused(415, code="unsupported_media_type"):
                await checks.key(path, content_type=content_type)


async def test_files_come_in_forms_alone(checks: Checks) -> None:
    await checks.use_key()
    for path in ("/v1/files", "/v1/audio/transcriptions"):
        assert await checks.key(path, content_type=FORM)
        for content_type in (JSON, "text/plain", "", "multipart/form-data"):
            with refused(415, "takes multipart/form-data"):
                await checks.key(path, content_type=content_type)


async def test_requests_without_a_body_need_no_content_type(checks: Checks) -> None:
    await checks.use_key()
    requests = "GET /v1/files, DELETE /v1/files/file-1, POST /v1/batches/batch-1/cancel, GET /v1/models"
    for request in requests.split(", "):
        method, path = request.split()
        assert await checks.key(path, method, content_type="")


async def test_a_body_comes_with_a_post_alone(checks: Checks) -> None:
    await checks.use_key()
    for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "BREW"):
        with refused(405, headers={"allow": "POST"}):
            await checks.key(method=method)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": -(10**12), "messages": [{"content": "x" * 999}]}),
        (COMPLETIONS, {"prompt": ["x"] * 20, "max_tokens": 1000}),
        ("/v1/embeddings", {"messages": [{"content": "x" * 300_000}]}),
    ],
)
async def test_a_body_reserves_what_the_same_line_of_a_batch_does(
    checks: Checks, path: str, fields: dict[str, Any]
) -> None:
    await checks.use_key(limits=Limits(tokens_per_day=1 << 40))
    body = json.dumps({"model": "m", **fields}).encode()
    await checks.body(await checks.key(path), body, path)
    assert checks.reserved() == [(cost.of_body(path, body), 1)]


async def test_counting_tokens_reserves_none(checks: Checks) -> None:
    await checks.use_key(limits=Limits(tokens_per_day=10))
    path = "/v1/messages/count_tokens"
    await checks.body(await checks.key(path), b'{"max_tokens": 5000}', path)
    assert checks.reserved() == [(0, 1)]


async def test_a_model_whose_name_is_not_ascii_fits_its_scope(checks: Checks) -> None:
    await checks.use_key(scopes=Scopes(models=("modèle-研究",)))
    passed = await checks.key()
    for body in ('{"model": "modèle-研究"}'.encode(), b'{"model": "mod\\u00e8le-\\u7814\\u7a76"}'):
        assert (await checks.body(passed, body))[identity.MODEL] == "modèle-研究"
    with refused(403):
        await checks.body(passed, b'{"model": "mod\xc3\xa8le"}')


async def test_what_is_reserved_for_a_request_that_ended_meanwhile_comes_back(checks: Checks) -> None:
    await checks.use_key(limits=Limits(concurrent=1, tokens_per_day=100_000))
    passed = await checks.key()
    admit = checks.limits.admit

    async def admit_late(*args: Any, **settings: Any) -> Any:
        outcome = await admit(*args, **settings)
        checks.authorizer.ended(passed[identity.REQUEST])  # Envoy's line comes before the answer
        return outcome

    checks.limits.admit = admit_late  # type: ignore[method-assign]
    with refused(499):
        await checks.body(passed)
    assert checks.reserved() == [(0, 0)]
    checks.limits.admit = admit  # type: ignore[method-assign]
    assert await checks.body(await checks.key())


async def test_what_is_reserved_for_a_client_that_left_comes_back(checks: Checks) -> None:
    await checks.use_key(limits=Limits(concurrent=1))
    left, entered = asyncio.Event(), asyncio.Event()
    admit = checks.limits.admit

    async def admit_slowly(*args: Any, **settings: Any) -> Any:
        pending = asyncio.ensure_future(admit(*args, **settings))
        entered.set()
        return await pending

    checks.limits.admit = admit_slowly  # type: ignore[method-assign]

    async def leaves() -> None:
        await left.wait()

    passed = await checks.key()
    check = asyncio.ensure_future(checks.authorizer.check_body(CHAT, passed, b"{}", leaves))
    await entered.wait()
    left.set()
    with refused(499):
        await check
    checks.limits.admit = admit  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(GatewayError):
                await checks.body(await checks.key())
                return
            await asyncio.sleep(0.01)


async def test_an_end_that_nobody_waits_for_leaves_nothing(checks: Checks) -> None:
    for number in range(1000):
        checks.authorizer.ended(f"request-{number}")
    assert not checks.authorizer._checks


async def test_a_socket_needs_a_model_of_its_key(checks: Checks) -> None:
    await checks.use_key(scopes=Scopes(models=("m",)))
    assert await checks.key(REALTIME, "GET", "model=m")
    for query in ("", "model=", "model=other", "model=m&model=other", "Model=m"):
        with refused(403):
            await checks.key(REALTIME, "GET", query)


async def test_a_socket_counts_until_it_ends(checks: Checks) -> None:
    await checks.use_key(limits=Limits(requests_per_minute=3, concurrent=1))
    first = await checks.key(REALTIME, "GET", "model=m")
    assert checks.shares.in_flight == 1
    with refused(429):
        await checks.key(REALTIME, "GET", "model=m")
    assert checks.shares.in_flight == 1, "one that is refused holds no slot"
    await checks.limits.ended([first[identity.REQUEST]])
    assert await checks.key(REALTIME, "GET", "model=m")


CHANGES_AND_LISTS = (
    *("POST /v1/files", "POST /v1/batches", "POST /v1/responses/resp-1/cancel", "DELETE /v1/files/file-1"),
    *(f"{method} {path}" for method in ("GET", "HEAD") for path in ("/v1/files", "/v1/batches", "/v1/usage")),
)


async def test_changes_and_lists_count_as_requests_and_hold_nothing(checks: Checks) -> None:
    for request in CHANGES_AND_LISTS:
        await checks.use_key(limits=Limits(requests_per_minute=2, concurrent=1, tokens_per_day=1))
        method, path = request.split()
        content_type = FORM if request == "POST /v1/files" else JSON
        for _ in range(2):
            assert await checks.key(path, method, content_type=content_type)
        with refused(429) as refusal:
            await checks.key(path, method, content_type=content_type)
        assert "retry-after" in refusal.value.headers, request
    assert checks.reserved() == [(0, 0)] * len(CHANGES_AND_LISTS)


async def test_a_change_gives_back_none_of_the_tokens_that_others_used(checks: Checks) -> None:
    await checks.use_key(limits=Limits(requests_per_minute=10, tokens_per_minute=1000, concurrent=1))
    passed = await checks.key()
    await checks.body(passed, b'{"max_tokens": 900}')
    before = checks.reserved()
    await checks.key("/v1/files/file-1", "DELETE")
    assert checks.reserved() == before
    with refused(429, "tokens per minute"):
        await checks.body(await checks.key(), b'{"max_tokens": 900}')


async def test_bodies_of_batches_that_do_not_end_hold_up_their_tenant_alone(checks: Checks) -> None:
    await checks.use_key(tenant="many")
    length = str(BODY_BYTES)
    for _ in range(MOST_BYTES // BODY_BYTES):
        first = await checks.key("/v1/batches", x_gateway_declared_bytes=length)
    waiting = asyncio.ensure_future(checks.key("/v1/batches", x_gateway_declared_bytes=length))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert await checks.key("/v1/batches/batch-1/cancel")
    assert await checks.key("/v1/batches", "GET")
    checks.authorizer.ended(first[identity.REQUEST])
    await asyncio.wait_for(waiting, 20)


async def test_polling_does_not_count(checks: Checks) -> None:
    await checks.use_key(limits=Limits(requests_per_minute=1))
    for path in ("/v1/models", "/v1/batches/batch-1", "/v1/files/file-1/content", "/v1/responses/resp-1"):
        for _ in range(3):
            assert await checks.key(path, "GET")
    assert checks.reserved() == []


async def test_a_key_for_some_models_is_named_them_for_the_list(checks: Checks) -> None:
    await checks.use_key(scopes=Scopes(models=("a,b", "modèle")))
    for path in ("/v1/models", "/v1/models/x"):
        assert identity.models_of(await checks.key(path, "GET")) == frozenset({"a,b", "modèle"})
    assert identity.models_of(await checks.key()) is None


async def test_a_name_of_somebody_else_finds_no_open_gateway(open_checks: Checks) -> None:
    for host in ("127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:80", "127.1.2.3"):
        assert await open_checks.key(host=host)
    others = "rebound.example localhost.example:8000 192.0.2.1:8000 127.0.0.1.example [::2]:8000 0.0.0.0:8000"
    for host in ("", *others.split()):
        with refused(421):
            await open_checks.key(host=host)


async def test_pages_of_somebody_else_get_nothing_and_own_and_allowed_ones_pass(open_checks: Checks) -> None:
    host = "127.0.0.1:8000"
    for path in (CHAT, "/v1/batches", "/v1/usage"):
        for site in ("cross-site", "same-site"):
            with refused(403):
                await open_checks.key(path, host=host, sec_fetch_site=site)
            with refused(403):
                await open_checks.key(path, host=host, origin="http://127.0.0.1:9999", sec_fetch_site=site)
        for origin in ("https://evil.example", "null", "http://[x"):
            with refused(403):
                await open_checks.key(path, host=host, origin=origin)
    assert await open_checks.key(host=host, origin=f"http://{host}", sec_fetch_site="same-origin")
    assert await open_checks.key(host=host, sec_fetch_site="none")
    assert await open_checks.key(host=host, origin="https://page.example", sec_fetch_site="cross-site")


async def test_a_gateway_with_keys_is_for_every_name(checks: Checks) -> None:
    await checks.use_key()
    assert await checks.key(host="chat.example", origin="https://other.example", sec_fetch_site="cross-site")


def test_every_path_has_one_part_that_answers() -> None:
    chosen = [route for route in routes.ROUTES if route.choice]
    assert {(route.path, route.to) for route in chosen} == {
        ("/v1/responses", routes.FRONTEND),
        ("/v1/embeddings", routes.CONTROL),
    }
    paths = [route.path for route in routes.ROUTES if route not in chosen]
    assert len(paths) == len(set(paths))
    for path in ("/v1/files/file-1/content", "/v1/responses/resp_1/input_items", "/v1/batches/b/cancel"):
        found = routes.find(path)
        assert found is not None and found.to == routes.CONTROL
    assert routes.find("/v1/filesystem") is None and routes.find("/v1") is None


def test_slots_of_all_workers_are_added_up() -> None:
    lines = [
        'dynamo_frontend_model_max_num_seqs{model="a"} 256',
        'dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="1",worker_type="decode"} 3',
        'dynamo_frontend_worker_active_decode_blocks{dp_rank="1",worker_id="1",worker_type="decode"} 0',
        'dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="2",worker_type="prefill"} 0',
    ]
    assert capacity.read("\n".join(lines)) == 512
    assert capacity.read("") is None
