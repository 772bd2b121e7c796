"""Tests prompt embeddings in the engine: the answers equal those to the tokens, without mix-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpu.children import Children
from cpu.direct import one_by_one

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def outcomes(children: Children, model: Path) -> dict[str, Any]:
    found: dict[str, Any] = children.ask("embeds:run", str(model))
    return found


@pytest.fixture
def found(outcomes: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Returns the outcome of the scenario with the test's name."""
    return outcomes[request.function.__name__.removeprefix("test_")]


def test_parity(found: dict[str, Any]) -> None:
    names = [name.removesuffix(", tokens") for name in found if name.endswith(", tokens")]
    assert len(names) == 7
    for name in names:
        for at in ("cold", "warm"):
            direct, long = found[f"{name}, {at}, direct"], found[f"{name}, {at}, long"]
            ids = [token for output in direct["outputs"] for token in output["token_ids"]]
            assert ids == found[f"{name}, tokens"], name
            assert one_by_one(direct["outputs"]) == one_by_one(long["outputs"]), name
            assert direct["grown"] == long["grown"], name
    assert found["long prompt, warm, direct"]["outputs"][-1]["cached_tokens"] == 1472  # whole blocks of 32


def test_cache(found: dict[str, Any]) -> None:
    names = [name.removesuffix(", alone") for name in found if name.endswith(", alone")]
    for name in names:
        alone = found[f"{name}, alone"]
        assert found[f"{name}, first"] == {"tokens": alone, "cached": 0}, name
        assert found[f"{name}, again"] == {"tokens": alone, "cached": 64}, name
    assert found["one, alone"] != found["other, alone"]


def test_repetition(found: dict[str, Any]) -> None:
    assert found["after"] == found["before"]


def test_moved(found: dict[str, Any]) -> None:
    assert len(found) == 7
    for name, tokens in found.items():
        assert tokens == found["whole"], name


def test_mixed(found: dict[str, Any]) -> None:
    names = [name.removesuffix(", alone") for name in found if name.endswith(", alone")]
    assert len(names) == 6
    for name in names:
        for number in range(3):
            assert found[f"{name}, together {number}"] == found[f"{name}, alone"], name
    assert found["w, tokens, alone"] != found["a, tokens, alone"] != found["base, tokens, alone"]
    assert found["a, embeds, alone"] == found["a, tokens, alone"]
