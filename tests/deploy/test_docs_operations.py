"""The page for operators quotes messages as they are, and tells of every failure there is."""

from __future__ import annotations

import pytest

from harness import messages

TEXT = messages.text()
QUOTED = messages.quoted(TEXT)
SECTIONS = (
    "The start fails",
    "It runs, and is not ready",
    "Requests fail",
    "It is slow",
    "Prefill and decode",
    "Adapters",
    "Images, video, audio",
    "Omni",
    "KV routing",
    "The cluster",
    "Shutdown and upgrade",
    "Disk and memory",
    "GPU",
)


@pytest.mark.parametrize("page", messages.PAGES)
def test_messages_that_are_ours_are_in_the_code(page: str) -> None:
    said = [text for text, mark in messages.quoted(messages.text(page)) if mark == messages.OURS]
    assert said
    invented = [
        text
        for text in said
        for piece in messages.pieces(text)
        if piece not in messages.FROM_ELSEWHERE and not messages.is_ours(piece)
    ]
    assert invented == []


def test_messages_of_others_are_marked_and_not_ours() -> None:
    others = [text for text, mark in QUOTED if mark != messages.OURS]
    assert len(others) > 10
    assert [text for text in others if all(map(messages.is_ours, messages.pieces(text)))] == []


def test_there_are_many_and_every_kind_of_failure_has_a_section() -> None:
    assert len(QUOTED) > 90
    assert [section for section in SECTIONS if f"\n## {section}\n" not in TEXT] == []


def test_invented_message_is_found() -> None:
    page = f"| {messages.HEADS[0]} | why |\n|---|---|\n| `no such message …` ‡, `503` | - |\n\n| `x y` | |\n"
    assert messages.quoted(page) == [("no such message …", "‡")]
    assert not messages.is_ours("no such message")
