"""Tests the data of the search models: passages, the split of the questions, and what is made of them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from demo.search import export, passages, questions, score, tokens, wordings, words
from demo.search.bert import Bert, Reranker, Rows, Shape
from demo.search.make import beside
from demo.search.pairs import Source, of_topics
from demo.search.passages import Passage
from demo.search.questions import Question, normal
from demo.search.rerank import begin, gather, numbers
from tokenizers import Tokenizer

from dynamo_vllm.models import demo as models


@cache
def found() -> tuple[Passage, ...]:
    return tuple(passages.read())


@cache
def asked() -> tuple[Question, ...]:
    return tuple(questions.read())


@cache
def cutter() -> Tokenizer:
    return tokens.learn([one.whole for one in found()], 1500)


def test_every_page_has_passages_that_fit_and_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert {one.page for one in found()} == set(passages.pages())
    assert all(len(one.text) <= passages.MAX_CHARACTERS and one.title for one in found())
    file = passages.write(list(found()), tmp_path)
    assert tuple(passages.load(tmp_path)) == found()
    assert file.stat().st_size <= passages.MAX_BYTES
    longest = max(len(one.ids) for one in cutter().encode_batch([one.whole for one in found()]))
    assert longest <= tokens.MAX_TOKENS


def test_passages_have_headings_above_them_and_no_marks() -> None:
    text = (
        "# Top\nSee [this](other.md), `code` and **bold**.\n```\n# not a heading\n```\n"
        "## Part\n| a | b |\n|---|---|\n| one | two |\n"
    )
    assert list(passages.cut("docs/x.md", text)) == [
        Passage("docs/x.md", "Top", "See this, code and bold. # not a heading"),
        Passage("docs/x.md", "Top > Part", "a; b one; two"),
    ]


def test_long_sections_are_cut_between_words() -> None:
    text = "# Top\n" + "word " * 400
    parts = [one.text for one in passages.cut("docs/x.md", text)]
    assert len(parts) > 1 and all(set(part.split()) == {"word"} for part in parts)
    figures = "# Top\n| 1.2 | 3.4 | 5.6 | 7.8 |\n"
    assert [one.text for one in passages.cut("docs/x.md", figures)] == [""]


def test_questions_name_pages_that_exist_and_each_stands_once() -> None:
    pages = set(passages.pages())
    assert {page for one in asked() for page in one.pages} == pages
    counts = Counter(normal(one.text) for one in asked())
    assert [text for text, count in counts.items() if count > 1] == []
    assert {page for one in of_topics() for page in one.pages} == pages


def test_enough_questions_are_held_out_of_every_page_by_their_words_alone() -> None:
    for one in asked()[:100]:
        assert Question(one.text.upper() + "!", one.pages).is_held_out == one.is_held_out
    unseen = questions.held_out(asked())
    assert len(unseen) >= 120 and len(questions.trained(asked())) == len(asked()) - len(unseen)
    counts = Counter(one.pages[0] for one in unseen)
    assert {page for page in passages.pages() if counts[page] < 3} == set()
    per_page = Counter(one.pages[0] for one in asked())
    assert min(per_page.values()) >= 12


def test_no_held_out_question_is_trained_on() -> None:
    later = questions.read(questions.LATER)
    assert {page for one in later for page in one.pages} == set(passages.pages())
    unseen = {normal(one.text) for one in (*questions.held_out(asked()), *later)}
    source = Source(found(), asked(), 3)
    assert not unseen & {normal(one.text) for one in source.questions}
    drawn = {normal(source.asked().text) for _ in range(3000)} | {
        normal(source.made().text) for _ in range(1000)
    }
    assert not unseen & drawn


def test_same_seed_gives_the_same_questions_which_know_their_page() -> None:
    one, other = (Source(found(), asked(), 5) for _ in range(2))
    assert [one.asked() for _ in range(20)] == [other.asked() for _ in range(20)]
    pairs = [one.made() for _ in range(200)]
    assert pairs == [other.made() for _ in range(200)]
    for pair in pairs:
        assert pair.passage is not None and pair.pages == {found()[pair.passage].page} and pair.text


def test_synonyms_replace_runs_of_words() -> None:
    said = wordings.with_synonyms(["which", "environment", "variables"], Random(1), 1.0)
    assert " ".join(said) in {"which variables", "which env vars"}


def test_page_counts_by_its_best_passage_and_any_right_page_counts() -> None:
    some = [Passage("a", "", "1"), Passage("b", "", "2"), Passage("a", "", "3"), Passage("c", "", "4")]
    assert score.best_of_pages([0.1, 0.5, 0.9, 0.2], some) == {"a": 2, "b": 1, "c": 3}
    result = score.SearchScore("x", 2)
    result.judge(Question("?", ("z", "b")), ["a", "b", "c", "z"])
    result.judge(Question("?", ("z",)), ["a", "b", "c", "z"])
    assert (result.first, result.first_three, result.wrong) == (0, 1, [("?", "z", "a")])


def test_reranker_orders_what_the_embedder_finds() -> None:
    some = [Passage(page, page, "") for page in "abcd"]
    vectors = {"a\n": [1.0, 0.0], "b\n": [0.8, 0.6], "c\n": [0.6, 0.8], "d\n": [0.1, 0.99], "q": [1.0, 0.0]}
    plain, reranked, half = score.score(
        some,
        [Question("q", ("b",))],
        lambda texts: np.array([vectors[text] for text in texts], np.float32),
        lambda question, texts: [float(text == "b\n") for text in texts],
        sizes=(1,),
    )
    assert (plain.first, plain.first_three, reranked.first) == (0, 1, 1)
    assert half.needed is None and "1 of 2 numbers" in half.name
    assert "| 100.0% | 100.0% of 1 | 90% |" in score.table([reranked])


def test_silent_model_is_a_mean_of_token_vectors() -> None:
    model = Bert(Shape(vocab_size=50, hidden_size=32, intermediate_size=64), 0.0).eval()
    words.silence(model)
    ids = [[2, 7, 9, 9, 3]]
    wanted = words.token_vectors(model)[ids[0]].mean(0)
    assert torch.allclose(model.mean(Rows.of(ids))[0], wanted, atol=1e-5)
    bag = words.bags(ids, 50, "cpu")
    assert torch.allclose(torch.sparse.mm(bag, words.token_vectors(model))[0] / 5, wanted, atol=1e-5)


def reranker() -> Reranker:
    torch.manual_seed(1)
    shape = Shape(vocab_size=60, hidden_size=64, intermediate_size=64)
    embedder = Bert(shape, 0.0).eval()
    model: Reranker = Reranker(dataclasses.replace(shape, hidden_size=128, intermediate_size=256), 0.0).eval()
    words.silence(embedder)
    begin(model, embedder)
    return model


QUESTION = [2, 10, 11, 12, 3]
SHOWN = [[10, 11, 12, 3], [10, 30, 31, 3], [40, 41, 42, 3]]


def test_reranker_begins_with_the_likeness_of_the_embedder_and_bags_give_its_numbers() -> None:
    model = reranker()
    likeness = model(_pairs())
    assert likeness.tolist() == sorted(likeness.tolist(), reverse=True)
    asked, shown = words.bags([QUESTION], 60, "cpu"), words.bags(SHOWN, 60, "cpu")
    found = numbers(model, gather(model, asked, 0), gather(model, shown, 1), torch.tensor([[0, 1, 2]]))
    assert torch.allclose(found[0], likeness, atol=1e-4)


def _pairs() -> Rows:
    types = [[0] * len(QUESTION) + [1] * len(one) for one in SHOWN]
    return Rows.of([QUESTION + one for one in SHOWN], types)


def test_folders_are_read_as_they_were_written(tmp_path: Path) -> None:
    shape = Shape(vocab_size=cutter().get_vocab_size(), hidden_size=64, intermediate_size=128)
    folder = export.save_embedder(Bert(shape), cutter(), tmp_path / export.EMBED)
    config = json.loads((folder / "config.json").read_bytes())
    assert config["is_matryoshka"] and config["matryoshka_dimensions"] == [*words.DIMENSIONS, 64]
    assert [one["path"] for one in json.loads((folder / "modules.json").read_bytes())][1] == "1_Pooling"
    assert beside(folder) is None
    export.save_reranker(Reranker(shape), cutter(), tmp_path / export.RERANK)
    assert beside(folder) == tmp_path / export.RERANK
    embed = score.embedding(*export.load_embedder(folder))
    assert np.allclose(np.linalg.norm(embed(["one", "two words"]), axis=1), 1, atol=1e-5)
    numbers = score.reranking(*export.load_reranker(tmp_path / export.RERANK))("one", ["two", "three"])
    assert len(numbers) == 2 and all(0 < number < 1 for number in numbers)


@pytest.mark.skipif(not models.is_here("embed"), reason="demo-embed is not installed")
def test_installed_passages_are_of_pages_that_exist() -> None:
    folder = models.folder("embed")
    assert {one.page for one in passages.load(folder)} <= set(passages.pages())
    assert (folder / passages.FILE).stat().st_size <= passages.MAX_BYTES
