"""Tests vLLM's parser of GPT-OSS behind ours in text mode, with its vocabulary and no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.tokenizers import get_tokenizer

from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm.parts import parsing
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.job import AnswerPart, Output
from dynamo_vllm.models import demo
from dynamo_vllm.wire_openai import ChatBody
from harness import vocabulary

CONFIG = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 2}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>It is four.<|return|>"
CALL = (
    f"{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"numbers": [2, 2]}<|call|>'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The config of a small GPT-OSS. Its tokenizer is of another model: only token ids are parsed."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    for file in demo.folder("chat").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return AsyncEngineArgs(model=str(folder), enforce_eager=True).create_model_config()


@pytest.fixture(scope="module")
def encoding() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(vocabulary.FOLDER, str(vocabulary.folder()))
        yield get_encoding()


def settings(model: Any, **names: str) -> EngineSettings:
    return EngineSettings(model=model.model, parses_answers=True, **names)  # type: ignore[arg-type]


def parsed(model: Any, encoding: Any, answer: str, **body: Any) -> AnswerPart:
    """Parses the answer token by token and joins the parts."""
    asked = ChatBody(messages=[{"role": "user", "content": "2 + 2?"}], **body)
    both = settings(model, tool_call_parser="openai", reasoning_parser="openai_gptoss")
    parser = parsing.parser_class(both, model)
    made = parsing.Parsing(parser, get_tokenizer(model.tokenizer), model, asked, {})
    choice = made.choice([])
    ids = encoding.encode(answer, allowed_special="all")
    found = [choice.part(Output([token], text="")) for token in ids]
    found.append(choice.part(Output([], text="", finish="stop", finished=True)))
    return AnswerPart(
        "".join(part.content for part in found),
        "".join(part.reasoning for part in found),
        [call for part in found for call in part.tool_calls],
    )


def test_thoughts_and_answer_come_apart(model: Any, encoding: Any) -> None:
    assert parsed(model, encoding, ANSWER) == AnswerPart("It is four.", "Two and two.", [])


def test_thoughts_and_calls_come_apart(model: Any, encoding: Any) -> None:
    found = parsed(model, encoding, CALL, tools=[ADD])
    assert (found.content, found.reasoning) == ("", "Two and two.")
    first, *rest = found.tool_calls
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "add")
    assert first["id"] and not any("id" in call for call in rest)
    arguments = "".join(call["function"].get("arguments", "") for call in found.tool_calls)
    assert json.loads(arguments) == {"numbers": [2, 2]}


def test_other_parsers_are_refused_at_the_start(model: Any) -> None:
    with pytest.raises(ConfigError, match="Harmony requires"):
        parsing.parser_class(settings(model, tool_call_parser="hermes"), model)
