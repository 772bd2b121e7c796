"""The page for operators quotes messages as they are, and tells of every failure there is."""

from __future__ import annotations

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


def test_messages_that_are_ours_are_in_the_code_and_those_of_others_are_not() -> None:
    for page in messages.PAGES:
        ours = [text for text, mark in messages.quoted(messages.text(page)) if mark == messages.OURS]
        pieces = [piece for text in ours for piece in messages.pieces(text)]
        assert pieces
        known = {piece for piece in pieces if piece in messages.FROM_ELSEWHERE or messages.is_ours(piece)}
        assert set(pieces) - known == set()
    others = [text for text, mark in QUOTED if mark != messages.OURS]
    assert len(others) > 10
    assert [text for text in others if all(map(messages.is_ours, messages.pieces(text)))] == []
    assert not messages.is_ours("no such message")


def test_there_are_many_and_every_kind_of_failure_has_a_section() -> None:
    assert len(QUOTED) > 90
    assert [section for section in SECTIONS if f"\n## {section}\n" not in TEXT] == []


def test_messages_are_found_with_the_mark_of_who_says_them() -> None:
    page = f"| {messages.HEADS[0]} | why |\n|---|---|\n| `no such message …` ‡, `503` | - |\n\n| `x y` | |\n"
    assert messages.quoted(page) == [("no such message …", "‡")]
