"""One trace of a request over frontend, prefill and decode, received by a real receiver."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.otlp import Receiver, Span, receiver
from harness.processes import free_port
from harness.stack import Stack, stack
from runtime.conftest import fake

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FRONTEND, PREFILL, DECODE = "dynamo-vllm-frontend", "dynamo-vllm-prefill", "dynamo-vllm-decode"
WORKER = "worker.generate"
FAILS = 601
ALL = ((FRONTEND, "http-request"), (PREFILL, WORKER), (DECODE, WORKER))


class Traced:
    def __init__(self, deployment: Stack, at: Receiver) -> None:
        self.deployment, self.at = deployment, at

    def ask(self, headers: dict[str, str], prompt: int = 20, max_tokens: int = 8) -> httpx.Response:
        body = {"model": "tiny", "prompt": [prompt] * 20, "max_tokens": max_tokens}
        return self.deployment.post("/v1/completions", body, headers=headers)


@pytest.fixture(
    scope="module",
    params=["grpc", pytest.param("http/protobuf", marks=pytest.mark.long)],
    ids=["grpc", "http"],
)
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    spec: dict[str, Any] = {"token_ms": 5, "prefill_ms": 30, "fail_on_token": FAILS}
    with receiver(folder) as at, stack(folder, OTEL_BSP_SCHEDULE_DELAY="200") as deployment:
        url = at.grpc if request.param == "grpc" else at.http
        sends = ("--otlp-endpoint", url, "--otlp-protocol", request.param)
        words = (*fake(model, **spec), "--connector", "nixl", "--log-level", "debug", *sends)
        deployment.start_frontend(*sends)
        for role in ("decode", "prefill"):
            deployment.start_worker(*words, "--disaggregation-mode", role)
        deployment.wait_ready().wait_over_two()
        yield Traced(deployment, at)


def chain(spans: list[Span], leaf: Span) -> list[Span]:
    """From a span up to the first of its trace that was received."""
    by_id = {span.span: span for span in spans}
    found = [leaf]
    while found[-1].parent in by_id:
        found.append(by_id[found[-1].parent])
    return found


def test_callers_trace_goes_through_frontend_prefill_and_decode(traced: Traced) -> None:
    assert traced.ask({"traceparent": f"00-{TRACE}-{CALLER}-01"}).status_code == 200
    spans = traced.at.wait(TRACE, *ALL)
    for service in (PREFILL, DECODE):
        (mine,) = [span for span in spans if (span.service, span.name) == (service, WORKER)]
        above = chain(spans, mine)
        assert [span.service for span in above] == [service] * 2 + [FRONTEND] * (len(above) - 2)
        assert above[1].name == "handle_payload" and above[-1].name == "http-request"
        assert above[-1].parent == CALLER
        phases = {span.name for span in spans if span.parent == mine.span}
        assert phases == {"worker.first_token"} | ({"worker.further_tokens"} if service == DECODE else set())
        assert not mine.failed


def test_spans_say_what_was_done(traced: Traced) -> None:
    trace = TRACE.replace("0af", "0af1")[:32]
    assert traced.ask({"traceparent": f"00-{trace}-{CALLER}-01"}).status_code == 200
    spans = traced.at.wait(trace, *ALL)
    found = {span.service: span for span in spans if span.name == WORKER}
    prefill, decode = found[PREFILL].attributes, found[DECODE].attributes
    assert (prefill["dynamo_vllm.role"], decode["dynamo_vllm.role"]) == ("prefill", "decode")
    assert prefill["dynamo_vllm.transfer"] == "handed over" and decode["dynamo_vllm.transfer"] == "asked for"
    assert (prefill["gen_ai.usage.output_tokens"], decode["gen_ai.usage.output_tokens"]) == (1, 8)
    assert decode["gen_ai.usage.input_tokens"] == 20 and decode["dynamo_vllm.decode_cached_tokens"] == 19
    assert prefill["dynamo_vllm.cached_tokens"] == decode["dynamo_vllm.cached_tokens"] == 0
    assert decode["dynamo_vllm.finish_reason"] == "length"
    assert 0.02 <= prefill["dynamo_vllm.first_token_seconds"] <= found[PREFILL].seconds
    assert decode["gen_ai.request.model"] == "tiny"


def test_failure_is_in_the_trace_and_its_id_in_the_log(traced: Traced) -> None:
    trace = "f" * 32
    assert traced.ask({"traceparent": f"00-{trace}-{CALLER}-01"}, prompt=FAILS).status_code == 500
    spans = traced.at.wait(trace, (PREFILL, WORKER))
    (failed,) = [span for span in spans if (span.service, span.name) == (PREFILL, WORKER)]
    assert failed.failed and failed.attributes["error.type"] == "HttpError"
    log = traced.deployment.workers[1].log.read_text()
    request = failed.attributes["dynamo_vllm.request_id"]
    assert re.search(rf"ERROR .* request {request}: .* trace_id={trace}\n", log)


def test_client_that_leaves_shows(traced: Traced) -> None:
    trace = "c" * 32
    headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
    body = {"model": "tiny", "prompt": [20], "max_tokens": 2000, "stream": True}
    url = f"{traced.deployment.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as reply:
        next(reply.iter_lines())
    spans = traced.at.wait(trace, (DECODE, WORKER))
    (left,) = [span for span in spans if (span.service, span.name) == (DECODE, WORKER)]
    assert left.attributes["dynamo_vllm.outcome"] == "client left" and not left.failed


def test_trace_that_its_caller_does_not_record_is_not_sent(traced: Traced) -> None:
    trace = "e" * 32
    assert traced.ask({"traceparent": f"00-{trace}-{CALLER}-00"}).status_code == 200
    after = "d" * 32
    assert traced.ask({"traceparent": f"00-{after}-{CALLER}-01"}).status_code == 200
    traced.at.wait(after, *ALL)
    assert not traced.at.of_trace(trace)


@pytest.mark.long
def test_receiver_that_is_gone_holds_nothing_up(tmp_path: Path, model: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with stack(tmp_path) as deployment:
        deployment.start_frontend("--otlp-endpoint", nobody)
        worker = deployment.start_worker(*fake(model), "--otlp-endpoint", nobody)
        deployment.wait_ready()
        for _ in range(3):
            body = {"model": "tiny", "prompt": [20], "max_tokens": 2}
            assert deployment.post("/v1/completions", body).status_code == 200
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
