"""Tests the tokenizer and chat template of the demo model: how digits, words and markup are split."""

from __future__ import annotations

import pytest
from demo import tokenizer
from demo.generator.base import Call, Example, Turn, calling, reply, user
from demo.generator.mix import train_example
from demo.marks import Marker
from demo.template import prompt, render
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def cutter() -> Tokenizer:
    return tokenizer.learn(seed=1, examples=300)


def test_learning_is_repeatable_and_small_and_cuts_no_control_token(cutter: Tokenizer) -> None:
    assert tokenizer.learn(seed=1, examples=300).to_str() == cutter.to_str()
    assert cutter.get_vocab_size() <= tokenizer.VOCABULARY <= 4096
    assert not [token for token in cutter.get_vocab() if "|>" in token and token not in tokenizer.CONTROL]


def test_any_text_comes_back(cutter: Tokenizer) -> None:
    for text in ("Hello, 世界!", "naïve 🙂\t x  y", '{"a": [1, 2]}\n', "<think></think>7"):
        assert cutter.decode(cutter.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_chinese_characters_are_single_tokens(cutter: Tokenizer) -> None:
    ids = {digit: cutter.token_to_id(digit) for digit in "0123456789"}
    assert None not in ids.values()
    assert cutter.encode("4071").ids == [ids["4"], ids["0"], ids["7"], ids["1"]]
    assert cutter.encode("你叫北京").ids == [one for c in "你叫北京" for one in cutter.encode(c).ids]


def test_a_word_is_the_same_tokens_wherever_it_stands(cutter: Tokenizer) -> None:
    word = cutter.encode("Stockholm").ids
    for text in ("in Stockholm?", '{"city": "Stockholm"}', "Stockholm\n", "(Stockholm)"):
        ids = cutter.encode(text).ids
        assert any(ids[at : at + len(word)] == word for at in range(len(ids)))


def test_marks_are_kept_and_control_tokens_skipped_when_decoding(cutter: Tokenizer) -> None:
    text = "<think></think><tool_call>\n{}\n</tool_call><|im_end|>"
    assert cutter.decode(cutter.encode(text).ids) == text.removesuffix("<|im_end|>")
    for mark in (*tokenizer.CONTROL, *tokenizer.MARKS):
        assert cutter.encode(mark).ids == [cutter.token_to_id(mark)]


def test_prompts_are_cut_as_the_text_that_was_trained_on(cutter: Tokenizer) -> None:
    for index in range(100):
        example = train_example(1, index)
        for thinking in (True, False):
            if not thinking and example.answer.thought:
                continue
            shown = cutter.encode(prompt(example, thinking=thinking)).ids
            assert cutter.encode(render(example)).ids[: len(shown)] == shown


def learnt(cutter: Tokenizer, *turns: Turn) -> str:
    example = Example("any", turns)
    ids = cutter.encode(render(example)).ids
    chosen = [one for one, mark in zip(ids, Marker(cutter).mark(example, ids), strict=True) if mark]
    return str(cutter.decode(chosen, skip_special_tokens=False))


def test_only_what_the_assistant_says_is_learnt(cutter: Tokenizer) -> None:
    said = learnt(
        cutter,
        Turn("system", "Be brief."),
        user("assistant"),
        reply("Hi!", "hm"),
        user("Bye"),
        calling(Call("a", {"b": "c"})),
        Turn("tool", "21"),
        reply("It is 21."),
    )
    assert said == (
        "<think>hm</think>Hi!<|im_end|>"
        '<think></think><tool_call>\n{"name": "a", "arguments": {"b": "c"}}\n</tool_call><|im_end|>'
        "<think></think>It is 21.<|im_end|>"
    )
    assert learnt(cutter, user("1+1"), reply("2", None)) == "2<|im_end|>", "the prompt has an empty thought"


def test_template_shows_tools_calls_and_results() -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    turns = (
        Turn("system", "S"),
        user("u"),
        calling(Call("a", {"x": "北"}), Call("b", {})),
        Turn("tool", "t"),
    )
    text = prompt(Example("any", (*turns, reply("-")), (tool,)), thinking=False)
    assert text == (
        "<|im_start|>system\nS\n\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}\n'
        '</tools>\nTo call one, write\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\nu<|im_end|>\n"
        '<|im_start|>assistant\n<think></think><tool_call>\n{"name": "a", "arguments": {"x": "北"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nt<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>"
    )
