"""Uploads of speech: who may send one, how much memory they take, and what gives it back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from starlette.applications import Starlette

from dynamo_vllm.gateway import identity, uploads
from dynamo_vllm.gateway.apis import transcription
from dynamo_vllm.gateway.apis.transcription import COPIES, FILE_BYTES, Transcription
from dynamo_vllm.gateway.replies import GatewayError
from harness.waiting import until_async

SECONDS = 60
HEAD = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
HEAD += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
STREAMS = b'--x\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
END = b"\r\n--x--\r\n"
ROOM = 1 << 20


class Gate:
    """Answers both questions, and notes them in order."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.refusal: GatewayError | None = None
        self.model_refusal: GatewayError | None = None

    async def check_limits(self, path: str, headers: Mapping[str, str], size: Any = None) -> dict[str, str]:
        self.questions.append(f"limits of {headers[identity.KEY]} {headers[identity.REQUEST]}")
        if self.refusal is not None:
            raise self.refusal
        return {"x-ratelimit-limit-requests": "7"}

    def check_model(self, headers: Mapping[str, str]) -> None:
        self.questions.append(f"model {headers[identity.MODEL]}")
        if self.model_refusal is not None:
            raise self.model_refusal


class Worker:
    """A worker that answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failure: BaseException | None = None
        self.has_begun = asyncio.Event()
        self.open = 0

    async def stream(self, request: Any, api: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        self.has_begun.set()
        self.open += 1
        try:
            yield {"text": "one"}
            await self.may_answer.wait()
            if self.failure is not None:
                raise self.failure
            about = {"language": "en", "duration": 1.0}
            yield {"done": True, **about, "segments": [], "words": None, "usage": {}}
        finally:
            self.open -= 1


class Deployment:
    def __init__(self) -> None:
        self.gate, self.worker = Gate(), Worker()
        workers: Any = self.worker
        self.routes = Transcription(workers, self.gate.check_limits, self.gate.check_model, held_bytes=ROOM)
        self.app = Starlette(routes=self.routes.routes())

    @property
    def is_free(self) -> bool:
        return (self.routes.room.used, self.routes.slots.total, self.worker.open) == (0, 0, 0)


class Upload:
    """A request whose pieces come when they are sent."""

    def __init__(self, deployment: Deployment, tenant: str = "a", declared: int | None = None) -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        length = [] if declared is None else [(b"content-length", str(declared).encode())]
        names = {identity.KEY: f"key-{tenant}", identity.TENANT: tenant, identity.REQUEST: "r"}
        headers = [(name.encode(), value.encode()) for name, value in names.items()]
        scope = {
            **{"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "query_string": b""},
            "headers": [(b"content-type", b"multipart/form-data; boundary=x"), *length, *headers],
        }
        self._has_left = False
        self.task = asyncio.ensure_future(deployment.app(scope, self._receive, self._send))

    def send(self, data: bytes, *, is_last: bool = False) -> Upload:
        self._pieces.put_nowait({"type": "http.request", "body": data, "more_body": not is_last})
        return self

    def send_whole(self, size: int = 9) -> Upload:
        return self.send(HEAD + b"a" * size + END, is_last=True)

    def leave(self) -> None:
        self._has_left = True
        self._pieces.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> dict[str, Any]:
        if self._has_left and self._pieces.empty():
            return {"type": "http.disconnect"}
        return await self._pieces.get()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        self.body += message.get("body", b"")

    async def answer(self) -> int | None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(self.task, return_exceptions=True)
        return self.status


async def all_leave(uploads: list[Upload]) -> None:
    for upload in uploads:
        upload.leave()
        await upload.answer()


@pytest.fixture
async def deployment() -> Deployment:
    return Deployment()


async def test_limits_are_asked_before_the_form_and_the_model_after_it(deployment: Deployment) -> None:
    upload = Upload(deployment)
    await until_async("the limits", lambda: deployment.gate.questions)
    assert deployment.gate.questions == ["limits of key-a r"]
    assert await upload.send_whole().answer() == 200
    assert deployment.gate.questions == ["limits of key-a r", "model whisper"]
    assert upload.headers["x-ratelimit-limit-requests"] == "7" and deployment.is_free


async def test_key_over_its_limits_is_refused_without_its_form(deployment: Deployment) -> None:
    deployment.gate.refusal = GatewayError(429, "too many", headers={"retry-after": "9"})
    upload = Upload(deployment, declared=FILE_BYTES)
    assert await upload.answer() == 429
    assert upload.headers["retry-after"] == "9" and deployment.is_free


async def test_model_that_the_key_is_not_for_is_refused(deployment: Deployment) -> None:
    deployment.gate.model_refusal = GatewayError(403, "not this one")
    assert await Upload(deployment).send_whole().answer() == 403
    assert deployment.is_free and not deployment.worker.has_begun.is_set()


async def test_declared_length_takes_no_room(deployment: Deployment) -> None:
    slow = [Upload(deployment, declared=FILE_BYTES).send(HEAD) for _ in range(8)]
    await until_async("the forms", lambda: deployment.routes.room.used == 8 * COPIES * len(HEAD))
    assert await Upload(deployment, "b").send_whole(1000).answer() == 200
    await all_leave(slow)
    assert {upload.status for upload in slow} == {499} and deployment.is_free


async def test_one_tenant_cannot_take_all_the_room(deployment: Deployment) -> None:
    greedy = [Upload(deployment, declared=FILE_BYTES).send(HEAD) for _ in range(8)]
    for upload in greedy:
        for _ in range(15):
            upload.send(bytes(8 << 10))
    await until_async("refusals", lambda: any(upload.task.done() for upload in greedy))
    refused = [upload for upload in greedy if upload.task.done()]
    assert {upload.status for upload in refused} == {429}
    assert all(b"this tenant" in upload.body for upload in refused)
    assert deployment.routes.room.used <= ROOM * 3 // 4
    assert await Upload(deployment, "b").send_whole(20 << 10).answer() == 200
    await all_leave(greedy)
    assert deployment.is_free


async def test_room_that_all_tenants_use_up_is_told_as_such(deployment: Deployment) -> None:
    held = [Upload(deployment, f"t{number}").send(HEAD + bytes(80 << 10)) for number in range(3)]
    await until_async("their bytes", lambda: deployment.routes.room.used > 3 * COPIES * (80 << 10))
    last = Upload(deployment, "last").send(HEAD + bytes(120 << 10))
    assert await last.answer() == 503 and last.headers["retry-after"] == "2"
    await all_leave(held)
    assert deployment.is_free


async def test_number_of_uploads_at_a_time_is_bounded_per_tenant(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcription, "MOST_UPLOADS", 4)
    slow = [Upload(deployment) for _ in range(4)]
    await until_async("one to be refused", lambda: any(upload.task.done() for upload in slow))
    assert sorted(str(upload.status) for upload in slow) == ["429", "None", "None", "None"]
    assert await Upload(deployment, "b").send_whole().answer() == 200
    await all_leave(slow)
    assert deployment.is_free


async def test_form_that_declares_too_much_is_refused_at_once(deployment: Deployment) -> None:
    assert await Upload(deployment, declared=FILE_BYTES + (1 << 20)).answer() == 413
    assert deployment.gate.questions == [] and deployment.is_free


async def test_form_that_comes_too_slowly_ends(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "FORM_SECONDS", 0.05)
    upload = Upload(deployment, declared=200).send(HEAD)
    assert await upload.answer() == 408
    assert b"was not complete after" in upload.body and deployment.is_free


async def test_form_that_is_refused_in_the_middle_frees_its_room(deployment: Deployment) -> None:
    assert await Upload(deployment).send(HEAD + b"a" * 5000 + b"\r\n--x\r\nnonsense\r\n").answer() == 400
    assert deployment.is_free


@pytest.mark.parametrize("moment", ["before the form", "in the form", "after the form"])
async def test_client_that_leaves_frees_its_room(deployment: Deployment, moment: str) -> None:
    deployment.worker.may_answer.clear()
    upload = Upload(deployment)
    if moment == "in the form":
        upload.send(HEAD + b"a" * 5000)
        await until_async("some bytes", lambda: deployment.routes.room.used > 0)
    elif moment == "after the form":
        upload.send_whole()
        await deployment.worker.has_begun.wait()
        assert deployment.routes.room.used > 0
    upload.leave()
    assert await upload.answer() == 499
    assert deployment.is_free


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_request_that_is_cancelled_at_any_step_frees_its_room(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def in_steps(do: Any, *values: Any) -> Any:
        await asyncio.sleep(0)
        return do(*values)

    monkeypatch.setattr(asyncio, "to_thread", in_steps)
    body = (STREAMS if is_streamed else b"") + HEAD + b"a" * 500 + END
    reached = set()
    for steps in range(60):
        deployment = Deployment()
        deployment.worker.may_answer.clear()
        upload = Upload(deployment).send(body, is_last=True)
        for _ in range(steps):
            await asyncio.sleep(0)
        reached.add((bool(deployment.gate.questions), deployment.worker.has_begun.is_set()))
        upload.task.cancel()
        await upload.answer()
        assert deployment.is_free, steps
    assert reached == {(False, False), (True, False), (True, True)}


async def test_worker_that_is_lost_frees_the_room(deployment: Deployment) -> None:
    deployment.worker.failure = GatewayError(503, "the worker is gone")
    assert await Upload(deployment).send_whole().answer() == 503
    assert deployment.is_free


async def test_room_is_held_until_the_answer_has_ended(deployment: Deployment) -> None:
    deployment.worker.may_answer.clear()
    upload = Upload(deployment).send(STREAMS + HEAD + b"a" * 500 + END, is_last=True)
    await until_async("the first text", lambda: b"one" in upload.body)
    assert deployment.routes.room.used > COPIES * 500 and deployment.routes.slots.total == 0
    deployment.worker.may_answer.set()
    assert await upload.answer() == 200
    assert deployment.is_free
