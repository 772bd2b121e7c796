"""What is read of a body decides; what cannot be read goes no further."""

from __future__ import annotations

import json
from functools import partial

import pytest

from dynamo_vllm.gateway import body_parts
from dynamo_vllm.gateway.control import bodies
from dynamo_vllm.gateway.control.bodies import EMBEDDINGS, PAST_FRONTEND_FIELDS, PINS, RESPONSES
from dynamo_vllm.gateway.envoy.routes import PAST_FRONTEND, STATELESS
from harness.refusals import refused

CHAT = "/v1/chat/completions"


def assert_refused(body: bytes, text: str = "", **fields: object) -> None:
    with refused(400, text, **fields):
        bodies.read(CHAT, body)


def test_what_is_no_json_object_is_refused() -> None:
    for body in (
        *(b"", b"[]", b'["m", 5]', b"null", b'"m"', b"{", b'{"model": "m"} {}', b'{"model": "m"}\0'),
        *(b'\xef\xbb\xbf{"model": "m"}', b'{"x": NaN}', b'{"x": "\\ud800"}', b'{"x": "\x01"}'),
        *(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"\x1f\x8b\x08" + bytes(20)),
    ):
        assert_refused(body)


def test_the_last_model_counts_and_only_a_text_is_one() -> None:
    for body, model in {
        '{"model": "m"}': "m",
        '{"mode\\u006c": "\\u006d"}': "m",
        '{"model": "a", "model": "m"}': "m",
        '{"x": "\xff", "y": 1e999, "model": "m"}': "m",
        "{}": "",
        '{"model": null}': "",
        '{"model": ["m"]}': "",
        '{"model": 5}': "",
    }.items():
        assert bodies.read(CHAT, body.encode("latin-1")) == (model, ""), body
    assert bodies.read(CHAT, '{"model": "modèle"}'.encode()) == ("modèle", "")


def test_a_model_with_a_control_character_or_a_very_long_name_is_refused_before_it_is_a_header() -> None:
    for character in "\0\n\r\x1f\x7f":
        body = json.dumps({"model": f"m{character}x-gateway-admin: 1"}).encode()
        assert_refused(body, "control character", parameter="model")
    assert_refused(json.dumps({"model": "m" * 100_000}).encode(), parameter="model")


def test_pins_are_refused_whatever_their_value_and_the_rest_of_nvext_passes() -> None:
    for nvext in ("null", "{}", '{"extra_fields": ["worker_id"]}'):
        bodies.check_nvext(f'{{"nvext": {nvext}}}'.encode())
    for nvext in ("[]", "[null, 7, 7]", "3", '"x"', "true"):
        assert_refused(f'{{"nvext": {nvext}}}'.encode(), parameter="nvext")
    for name in PINS:
        for value in ("7", "null", '"7"', "[7]", "{}"):
            body = f'{{"nve\\u0078t": {{"{name[:-1]}\\u{ord(name[-1]):04x}": {value}}}}}'
            assert_refused(body.encode(), parameter=f"nvext.{name}")


def test_the_last_of_two_nvext_counts_as_in_the_frontend() -> None:
    bodies.check_nvext(b'{"nvext": {"router": 1}, "nvext": {}}')
    with refused(400):
        bodies.check_nvext(b'{"nvext": {}, "nvext": {"router": 1}}')


def test_a_response_that_keeps_nothing_is_for_the_frontend() -> None:
    for fields, choice in (
        ({"store": False}, STATELESS),
        ({"store": False, "background": False, "previous_response_id": None}, STATELESS),
        ({"store": False, "background": True}, ""),
        ({"store": False, "previous_response_id": "resp-1"}, ""),
        ({"store": 0}, ""),
        ({"store": True}, ""),
        ({}, ""),
    ):
        assert bodies.read(RESPONSES, json.dumps(fields).encode()) == ("", choice), fields
        assert bodies.read(CHAT, json.dumps(fields).encode()) == ("", "")


def test_embeddings_with_a_field_that_the_frontend_drops_are_not_for_it() -> None:
    assert bodies.read(EMBEDDINGS, b'{"input": "x"}') == ("", "")
    for name in PAST_FRONTEND_FIELDS:
        body = json.dumps({"input": "x", name: None}).encode()
        assert bodies.read(EMBEDDINGS, body) == ("", PAST_FRONTEND), name


@pytest.mark.parametrize("part", [b"0,", b"\\n"])
def test_a_body_that_takes_long_to_read_is_refused(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "MOST_PARTS", 100)
    whole = b'{"model": "m", "x": %s}'
    text = (b"[%s0]" if part == b"0," else b'"%s"') % (part * 90)
    assert bodies.read(CHAT, whole % text) == ("m", "")
    long = whole % text.replace(part, 2 * part)
    for read in (partial(bodies.read, CHAT), bodies.check_nvext):
        with refused(413):
            read(long)


def test_bytes_without_values_are_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "MOST_PARTS", 100)
    assert bodies.read(CHAT, b'{"model": "m", "x": "%s"}' % (b"A" * 10_000)) == ("m", "")


def test_a_long_name_of_a_model_is_refused_before_it_is_decoded() -> None:
    longest = b"\\u0061" * bodies.LONGEST_MODEL
    assert bodies.read(CHAT, b'{"model": "%s"}' % longest) == ("a" * bodies.LONGEST_MODEL, "")
    for name in (longest + b"a", b"a" * (bodies.LONGEST_MODEL + 1)):
        assert_refused(b'{"model": "%s"}' % name, parameter="model")


def test_a_second_request_that_nobody_counts_is_refused() -> None:
    body = '{"model": "m", "nvext": {"agent_hints": %s}}'
    passing = '{"speculative_prefill": false, "priority": 5}', '{"speculative_prefill": null, "osl": 9}'
    for hints in ("null", "{}", *passing):
        assert bodies.read(CHAT, (body % hints).encode()) == ("m", "")
    for hints in ('{"speculative_prefill": true}', '{"speculative\\u005fprefill": true}'):
        assert_refused((body % hints).encode(), parameter="nvext.agent_hints.speculative_prefill")
    for hints in ("[5, null, 9, true]", "true"):
        assert_refused((body % hints).encode(), parameter="nvext.agent_hints")
