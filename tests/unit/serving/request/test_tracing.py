"""A trace's id behind log lines about its request, and the variables that switch traces on."""

from __future__ import annotations

import logging
import os

import pytest

from dynamo_vllm.config import build, runtime_env
from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.serving.logging import add_trace, trace_ids


def shown(message: object, *args: object) -> str:
    record = logging.LogRecord("name", logging.INFO, "file", 1, message, args, None)
    assert add_trace(record)
    return record.getMessage() + str(vars(record)["trace"])


def test_line_about_a_traced_request_ends_with_its_trace_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(trace_ids, "r1", "abc")
    aborted = "request r1: aborted after 3 tokens trace_id=abc"
    assert shown("request %s: aborted after %d tokens", "r1", 3) == aborted
    assert shown("request %s: refused", "r1#2") == "request r1#2: refused trace_id=abc"
    assert shown("request %s: refused", "r2") == "request r2: refused"
    assert shown("adapter %s: loaded", "r1") == "adapter r1: loaded"
    assert shown("request without arguments") == "request without arguments"
    assert shown(ValueError("no text")) == "no text"


def exported(argv: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(os, "environ", dict(environment))
    options, _ = build.parse(FrontendOptions, argv, environment, "p", "d")
    runtime_env.export(options, environment, 1, "dynamo-vllm-frontend")
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}


def test_endpoint_switches_the_runtime_on_and_what_the_environment_says_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "OTEL_EXPORT_ENABLED" not in exported([], {}, monkeypatch)
    by_flags = exported(
        ["--otlp-endpoint", "http://x:4318", "--otlp-protocol", "http/protobuf"], {}, monkeypatch
    )
    protocol = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    assert (
        by_flags.items()
        >= {
            "OTEL_EXPORT_ENABLED": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318",
            "OTEL_SERVICE_NAME": "dynamo-vllm-frontend",
            **dict.fromkeys(protocol, "http/protobuf"),
        }.items()
    )
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_BLRP_SCHEDULE_DELAY": "1",
    }
    variables = exported([], environment, monkeypatch)
    assert variables.items() >= {**environment, "OTEL_EXPORT_ENABLED": "1"}.items()


@pytest.mark.parametrize(
    ("protocol", "url"), [("grpc", "http://x:4317/"), ("http/protobuf", "http://x:4317/v1/traces")]
)
def test_spans_have_a_path_over_http(protocol: str, url: str) -> None:
    options = FrontendOptions(otlp_endpoint="http://x:4317/", otlp_protocol=protocol)
    assert options.traces_url == url
