"""Tests prompt embeddings in the engine: the answers equal those to the tokens, without mix-ups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpu.outputs import one_by_one
from harness.stack import environment
from harness.warm import FORKED, Zygote

pytestmark = pytest.mark.more


@pytest.fixture
def found(warm: Zygote, model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the outcome of the scenario with the test's name."""
    out, log = tmp_path / "out.json", tmp_path / "log"
    args = [str(model), request.function.__name__.removeprefix("test_"), str(out)]
    child = warm.fork("cpu.embeds:run", args, environment(tmp_path, **FORKED), log)
    assert child.wait(300) == 0, log.read_text()[-3000:]
    given: dict[str, Any] = json.loads(out.read_text())
    return given


def test_parity(found: dict[str, Any]) -> None:
    names = [name.removesuffix(", tokens") for name in found if name.endswith(", tokens")]
    assert len(names) == 7
    for name in names:
        for at in ("cold", "warm"):
            direct, long = found[f"{name}, {at}, direct"], found[f"{name}, {at}, long"]
            ids = [token for output in direct["outputs"] for token in output["token_ids"]]
            assert ids == found[f"{name}, tokens"], name
            pairs = zip(one_by_one(direct["outputs"]), one_by_one(long["outputs"]), strict=True)
            for ours, theirs in pairs:
                assert ours | {"text": None} == theirs | {"text": None}, name
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


@pytest.mark.long
def test_moved(found: dict[str, Any]) -> None:
    assert len(found) == 7
    for name, tokens in found.items():
        assert tokens == found["whole"], name


def test_adapter(found: dict[str, Any]) -> None:
    assert found["tokens, direct"] != found["base"]
    assert found["embeds, direct"] == found["tokens, direct"]
    assert found["embeds, long"] == found["tokens, long"] == found["tokens, direct"]
    assert found["base after"] == found["base"]


def test_mixed(found: dict[str, Any]) -> None:
    names = [name.removesuffix(", alone") for name in found if name.endswith(", alone")]
    assert len(names) == 6
    for name in names:
        for number in range(3):
            assert found[f"{name}, together {number}"] == found[f"{name}, alone"], name
    assert found["w, tokens, alone"] != found["a, tokens, alone"] != found["base, tokens, alone"]
    assert found["a, embeds, alone"] == found["a, tokens, alone"]
