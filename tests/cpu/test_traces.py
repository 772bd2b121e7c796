"""Tests the engine's own span in the trace of a request, in a prefill and in a decode worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu.pairs import Pairs, pairs, prompt
from harness.otlp import Receiver, receiver
from harness.warm import Zygote

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROLES = ("dynamo-vllm-prefill", "dynamo-vllm-decode")
OURS, VLLMS = "worker.generate", "llm_request"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with receiver(tmp_path_factory.mktemp("spans")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(
    at: Receiver, warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pairs]:
    """Enables tracing only by OpenTelemetry's own variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", at.grpc)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with pairs(warm, model, tmp_path_factory.mktemp("pair")) as made:
            yield made


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"logprobs": 1}, marks=pytest.mark.long)], ids=["direct egress", "the long way"]
)
def test_engines_tell_what_they_did_below_the_workers_span(
    pair: Pairs, at: Receiver, more: dict[str, int]
) -> None:
    trace = TRACE[:-1] + str(len(more))
    body = {"model": "tiny", "prompt": prompt(300), "max_tokens": 6, "ignore_eos": True, **more}
    headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
    assert pair.stack.post("/v1/completions", body, headers=headers).status_code == 200
    wanted = [(role, name) for role in ROLES for name in (OURS, VLLMS)]
    spans = at.wait(trace, *wanted, ("dynamo-vllm-frontend", "http-request"))
    tokens = []
    for role in ROLES:
        (ours,) = [span for span in spans if (span.service, span.name) == (role, OURS)]
        (engines,) = [span for span in spans if (span.service, span.name) == (role, VLLMS)]
        assert engines.parent == ours.span
        for figure in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode"):
            assert engines.attributes[f"gen_ai.latency.{figure}"] >= 0
        tokens.append(engines.attributes["gen_ai.usage.completion_tokens"])
    assert tokens == [1, 6]
