"""Describes what Envoy writes and says itself: its access log, the ids of ended requests, its own errors."""

from __future__ import annotations

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.envoy.words import AUTHZ, Json, typed

LOGGED = {
    "time": "%START_TIME%",
    "request": f"%REQ({identity.REQUEST})%",
    "key": f"%REQ({identity.KEY})%",
    "tenant": f"%REQ({identity.TENANT})%",
    "model": f"%DYNAMIC_METADATA({AUTHZ}:{identity.MODEL})%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "protocol": "%PROTOCOL%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "bytes_in": "%BYTES_RECEIVED%",
    "bytes_out": "%BYTES_SENT%",
    "ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "agent": "%REQ(USER-AGENT)%",
}
"""No text of a request or an answer, no query, no credential."""


def access_log(path: str) -> Json:
    return typed(
        "envoy.access_loggers.file",
        "envoy.extensions.access_loggers.file.v3.FileAccessLog",
        path=path,
        log_format={"json_format": LOGGED},
    )


def ended_log(path: str) -> Json:
    """One line for each request that the control app let in."""
    let_in = {"header_filter": {"header": {"name": identity.KEY, "present_match": True}}}
    log = typed(
        "envoy.access_loggers.file",
        "envoy.extensions.access_loggers.file.v3.FileAccessLog",
        path=path,
        log_format={"text_format_source": {"inline_string": f"%REQ({identity.REQUEST})% %RESPONSE_CODE%\n"}},
    )
    return {**log, "filter": let_in}


def own_errors() -> Json:
    """Envoy's own errors in the shape of OpenAI's; those of the control app have it already."""
    shape: Json = {
        "type": "error",
        "error": {
            "message": "%LOCAL_REPLY_BODY%",
            "type": "gateway_error",
            "param": None,
            "code": "%RESPONSE_CODE_DETAILS%",
        },
    }
    no_route = {**shape, "error": {**shape["error"], "message": "there is no %REQ(:METHOD)% %PATH(NQ)%"}}
    return {
        "mappers": [
            {
                "filter": {"response_flag_filter": {"flags": ["NR"]}},
                "body_format_override": {"json_format": no_route, "content_type": "application/json"},
            },
            {
                "filter": {
                    "and_filter": {
                        "filters": [
                            {"response_flag_filter": {"flags": ["UAEX"]}},
                            {"status_code_filter": {"comparison": {"op": "EQ", "value": _number(503)}}},
                        ]
                    }
                },
                "body": {"inline_string": "the gateway's control app does not answer; try again in a moment"},
                "body_format_override": {"json_format": shape, "content_type": "application/json"},
            },
            {
                "filter": {"response_flag_filter": {"flags": ["UAEX"]}},
                "body_format_override": {
                    "text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"},
                    "content_type": "application/json",
                },
            },
        ],
        "body_format": {"json_format": shape, "content_type": "application/json"},
    }


def _number(value: int) -> Json:
    return {"default_value": value, "runtime_key": "dynamo_vllm.not_set"}
