"""Tests that prompts found in a KV tier get the answers of an engine without tiers.

This is a few seconds of the proof; `python scripts/tiers_proof` runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiers_proof.case import TOLERANCES
from tiers_proof.cases import BY_NAME
from tiers_proof.proof import Proof
from tiers_proof.rows import Row

from harness.warm import Zygote

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def proof(warm: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    """Keeps the answers without tiers for all tests, and asks for them while tests run."""
    made = Proof(warm, tmp_path_factory.mktemp("tiers"), "cpu")
    with ThreadPoolExecutor(1) as thread:
        for case in ("quick-gqa", "quick-interleaved", "quick-weights"):
            thread.submit(made.prepare, BY_NAME[case])
        yield made


def row(proof: Proof, case: str, tier: str) -> Row:
    return proof.row(BY_NAME[case], tier)


@pytest.mark.parametrize(
    ("case", "tier"),
    [
        ("quick-gqa", "late-host"),
        ("quick-interleaved", "late-disk"),
        ("quick-weights", "disk"),
    ],
)
def test_answers_are_equal(proof: Proof, case: str, tier: str) -> None:
    """Late copies are done in any order, as late as vLLM allows."""
    found = row(proof, case, tier)
    assert found.verdict == "equal", found.text()
    assert found.outcome is not None and found.outcome.loaded > 500, found.text()
    assert found.outcome.tolerance == TOLERANCES["cpu"]["float32"], found.text()


@pytest.mark.parametrize(
    ("case", "broken"),
    [
        ("quick-gqa", "next-block"),
        ("quick-gqa", "half-page"),
        ("quick-interleaved", "other-group"),
        ("quick-interleaved", "one-layer-less"),
    ],
)
def test_wrong_copies_are_noticed(proof: Proof, case: str, broken: str) -> None:
    found = row(proof, case, f"broken:{broken}")
    assert found.verdict == "noticed", found.text()


def test_engine_that_cannot_continue_a_prompt_is_refused(proof: Proof) -> None:
    """On CPU vLLM computes a prompt with latent attention only as a whole."""
    found = row(proof, "quick-mla", "host")
    assert (found.verdict, found.reason[:10]) == ("refused", "ValueError"), found.text()
