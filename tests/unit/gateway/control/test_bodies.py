"""What is read of a body decides; what cannot be read goes no further."""

from __future__ import annotations

import json

import pytest

from dynamo_vllm.gateway import body_parts
from dynamo_vllm.gateway.control import bodies
from dynamo_vllm.gateway.control.bodies import EMBEDDINGS, PAST_FRONTEND_FIELDS, PINS, RESPONSES
from dynamo_vllm.gateway.envoy.routes import PAST_FRONTEND, STATELESS
from dynamo_vllm.gateway.replies import GatewayError

CHAT = "/v1/chat/completions"


def refusal(body: bytes) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        bodies.read(CHAT, body)
    return refused.value


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b'["m", 5]', b"null", b'"m"', b"{", b'{"model": "m"} {}', b'{"model": "m"}\0'),
        b'\xef\xbb\xbf{"model": "m"}',
        b'{"x": NaN}',
        b'{"x": "\\ud800"}',
        b'{"x": "\x01"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x1f\x8b\x08" + bytes(20),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(body).status == 400


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "m"}', "m"),
        (b'{"mode\\u006c": "\\u006d"}', "m"),
        (b'{"model": "a", "model": "m"}', "m"),
        (b'{"x": "\xff", "y": 1e999, "model": "m"}', "m"),
        ('{"model": "modèle"}'.encode(), "modèle"),
        (b"{}", ""),
        (b'{"model": null}', ""),
        (b'{"model": ["m"]}', ""),
        (b'{"model": 5}', ""),
    ],
)
def test_the_last_model_counts_and_only_a_text_is_one(body: bytes, model: str) -> None:
    assert bodies.read(CHAT, body) == (model, "")


@pytest.mark.parametrize("character", ["\0", "\n", "\r", "\x1f", "\x7f"])
def test_a_control_character_in_a_model_is_named(character: str) -> None:
    error = refusal(json.dumps({"model": f"m{character}x-gateway-admin: 1"}).encode())
    assert (error.status, error.parameter) == (400, "model") and "control character" in error.message


def test_a_very_long_model_is_refused_before_it_is_a_header() -> None:
    assert refusal(json.dumps({"model": "m" * 100_000}).encode()).parameter == "model"


@pytest.mark.parametrize("nvext", ["null", "{}", '{"extra_fields": ["worker_id"]}'])
def test_the_rest_of_nvext_passes(nvext: str) -> None:
    bodies.check_nvext(f'{{"nvext": {nvext}}}'.encode())


@pytest.mark.parametrize("value", ["7", "null", '"7"', "[7]", "{}"])
@pytest.mark.parametrize("name", PINS)
def test_a_pin_is_found_whatever_its_value(name: str, value: str) -> None:
    error = refusal(f'{{"nve\\u0078t": {{"{name[:-1]}\\u{ord(name[-1]):04x}": {value}}}}}'.encode())
    assert error.parameter == f"nvext.{name}"


@pytest.mark.parametrize("nvext", ["[]", "[null, 7, 7]", "3", '"x"', "true"])
def test_nvext_without_names_is_refused(nvext: str) -> None:
    assert refusal(f'{{"nvext": {nvext}}}'.encode()).parameter == "nvext"


def test_the_last_of_two_nvext_counts_as_in_the_frontend() -> None:
    bodies.check_nvext(b'{"nvext": {"router": 1}, "nvext": {}}')
    with pytest.raises(GatewayError):
        bodies.check_nvext(b'{"nvext": {}, "nvext": {"router": 1}}')


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({"store": False}, STATELESS),
        ({"store": False, "background": False, "previous_response_id": None}, STATELESS),
        ({"store": False, "background": True}, ""),
        ({"store": False, "previous_response_id": "resp-1"}, ""),
        ({"store": 0}, ""),
        ({"store": True}, ""),
        ({}, ""),
    ],
)
def test_a_response_that_keeps_nothing_is_for_the_frontend(fields: dict[str, object], choice: str) -> None:
    assert bodies.read(RESPONSES, json.dumps(fields).encode()) == ("", choice)
    assert bodies.read(CHAT, json.dumps(fields).encode()) == ("", "")


@pytest.mark.parametrize("name", PAST_FRONTEND_FIELDS)
def test_embeddings_with_a_field_that_the_frontend_drops_are_not_for_it(name: str) -> None:
    assert bodies.read(EMBEDDINGS, json.dumps({"input": "x", name: None}).encode()) == ("", PAST_FRONTEND)
    assert bodies.read(EMBEDDINGS, b'{"input": "x"}') == ("", "")


@pytest.mark.parametrize("part", [b"0,", b"\\n"])
def test_a_body_that_takes_long_to_read_is_refused(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "MOST_PARTS", 100)
    whole = b'{"model": "m", "x": %s}'
    text = (b"[%s0]" if part == b"0," else b'"%s"') % (part * 90)
    assert bodies.read(CHAT, whole % text) == ("m", "")
    long = text.replace(part, 2 * part)
    assert refusal(whole % long).status == 413
    with pytest.raises(GatewayError):
        bodies.check_nvext(whole % long)


def test_bytes_without_values_are_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "MOST_PARTS", 100)
    assert bodies.read(CHAT, b'{"model": "m", "x": "%s"}' % (b"A" * 10_000)) == ("m", "")


def test_a_long_name_of_a_model_is_refused_before_it_is_decoded() -> None:
    longest = b"\\u0061" * bodies.LONGEST_MODEL
    assert bodies.read(CHAT, b'{"model": "%s"}' % longest) == ("a" * bodies.LONGEST_MODEL, "")
    for name in (longest + b"a", b"a" * (bodies.LONGEST_MODEL + 1)):
        error = refusal(b'{"model": "%s"}' % name)
        assert (error.status, error.parameter) == (400, "model")


@pytest.mark.parametrize(
    ("hints", "is_refused"),
    [
        *((hints, False) for hints in ("null", "{}", '{"speculative_prefill": false, "priority": 5}')),
        ('{"speculative_prefill": null, "osl": 9}', False),
        *((hints, True) for hints in ('{"speculative_prefill": true}', "[5, null, 9, true]", "true")),
        ('{"speculative\\u005fprefill": true}', True),
    ],
)
def test_a_second_request_that_nobody_counts_is_refused(hints: str, is_refused: bool) -> None:
    body = f'{{"model": "m", "nvext": {{"agent_hints": {hints}}}}}'.encode()
    if is_refused:
        error = refusal(body)
        assert error.status == 400 and str(error.parameter).startswith("nvext.agent_hints")
    else:
        assert bodies.read(CHAT, body) == ("m", "")
