"""Roles are known by their cards: nobody outside `roles/` asks for the name of one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.roles.table import MAKERS

SRC = Path(__file__).parents[3] / "src" / "dynamo_vllm"


def asked_by_name(source: str) -> list[str]:
    """Comparisons of `.role`, or of something called role, with a role's name."""
    if "role" not in source or not any(f'"{name}"' in source for name in CARDS):
        return []  # most files; to read their syntax takes seconds
    compared = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [ast.unparse(node) for node in compared if _names_a_role(node) and _is_about_roles(node)]


def _names_a_role(node: ast.Compare) -> bool:
    values = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(value in CARDS for value in values if isinstance(value, str))


def _is_about_roles(node: ast.Compare) -> bool:
    named = [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    named += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return any("role" in name for name in named)


def test_nobody_outside_asks_for_the_name_of_a_role() -> None:
    files = [path for path in SRC.rglob("*.py") if path.relative_to(SRC).parts[0] != "roles"]
    found = {str(path.relative_to(SRC)): asked_by_name(path.read_text()) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    ['o.role == "encode"', 'role in ("prefill", "decode")', '{"prefill"} & {1} or role_of(g) != "agg"'],
)
def test_such_a_question_is_found(source: str) -> None:
    assert asked_by_name(source)


def test_every_role_can_be_made() -> None:
    assert CARDS.keys() == MAKERS.keys()


def test_cards_tell_the_roles_apart() -> None:
    abilities = ("does_all", "gives_kv", "takes_kv", "encodes_media")
    told = {name: [what for what in abilities if getattr(card, what)] for name, card in CARDS.items()}
    special = {"prefill": ["gives_kv"], "decode": ["takes_kv"], "encode": ["encodes_media"]}
    assert told == {**dict.fromkeys(("agg", "pooling", "transcription"), ["does_all"]), **special}
    kinds = {name: card.kind for name, card in CARDS.items() if card.kind != "generate"}
    assert kinds == {"pooling": "pooling", "transcription": "transcription"}
    assert [name for name, card in CARDS.items() if card.helps_others] == ["prefill", "encode"]
