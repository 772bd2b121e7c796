"""The check of a batch's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.gateway import body_parts
from dynamo_vllm.gateway.batches.lines import MOST_ERRORS, check, request_of

CHAT = "/v1/chat/completions"
DEEP = "[" * 200_000 + "]" * 200_000


def line(number: int = 0, **changes: Any) -> str:
    whole = {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": {"model": "m"}}
    return json.dumps(whole | changes)


def checked(folder: Path, *texts: str | bytes, most: int = 100) -> tuple[int, list[tuple[int | None, str]]]:
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(t.encode() if isinstance(t, str) else t for t in texts))
    total, faults = check(path, CHAT, most)
    return total, [(fault.line, fault.code) for fault in faults]


def test_empty_lines_do_not_count(tmp_path: Path) -> None:
    assert checked(tmp_path, line(1), "", "  ", line(2), "") == (2, [])


def test_bad_line_is_named(tmp_path: Path) -> None:
    bad_lines: tuple[tuple[str | bytes, str], ...] = (
        ("{", "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        ("[]", "invalid_request"),
        ("{}", "invalid_request"),
        (line(custom_id=5), "invalid_request"),
        (line(custom_id=""), "invalid_custom_id"),
        (line(custom_id="x" * 600), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint"),
        (line(body={}), "invalid_request"),
        (line(body={"model": "m", "stream": True}), "stream_not_supported"),
        (line(body={"model": "m", "background": True}), "background_not_supported"),
        (line(body={"model": "m", "previous_response_id": "r"}), "history_not_supported"),
        (line().replace('"m"', f'"m", "previous_response_id": {DEEP}'), "invalid_json_line"),
        (line().replace('"m"', f'"m", "unknown": {DEEP}'), "invalid_json_line"),
        (line().replace('"m"', f'"m", "previous_response_id": {"9" * 5000}'), "invalid_request"),
    )
    for text, code in bad_lines:
        assert checked(tmp_path, line(1), text) == (2, [(2, code)]), text[:200]


def test_a_line_that_takes_long_to_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "MOST_PARTS", 1000)
    lines = (
        line(number, body={"model": "m", "prompt": [0] * count}) for number, count in enumerate((900, 1100))
    )
    assert checked(tmp_path, *lines) == (2, [(2, "too_many_values")])


def test_same_id_twice_is_refused(tmp_path: Path) -> None:
    assert checked(tmp_path, line(1), line(2), line(1)) == (3, [(3, "duplicate_custom_id")])


def test_empty_and_endless_files_are_refused(tmp_path: Path) -> None:
    assert checked(tmp_path, "", "") == (0, [(None, "empty_file")])
    assert checked(tmp_path, *(line(n) for n in range(5)), most=3) == (4, [(4, "too_many_requests")])
    _, faults = checked(tmp_path, *["{"] * 100)
    assert len(faults) == MOST_ERRORS


def test_a_file_of_empty_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    assert checked(tmp_path, *[""] * 5000, line(1), most=10) == (0, [(101, "too_many_lines")])


def test_long_ids_are_shortened_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([line(custom_id="x" * 512)] * 2))
    _, (fault,) = check(path, CHAT, 10)
    assert len(fault.message) < 200


def test_body_reaches_the_frontend_as_it_was_written() -> None:
    text = '{"custom_id":"a","method":"POST","url":"/x","body":{"model":"m", "temperature":0.10}}'
    assert request_of(text.encode(), CHAT) == ("a", b'{"model":"m", "temperature":0.10}')
    _, body = request_of(text.replace('"model"', '"store":true,"model"').encode(), "/v1/responses")
    assert json.loads(body)["store"] is False
