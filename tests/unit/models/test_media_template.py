"""The chat template made of --mm-prompt-template, and the one that leaves chats with input_audio empty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from dynamo_vllm.models.media_template import jinja, of_model, without_input_audio
from dynamo_vllm.models.tiny import CHAT_TEMPLATE

PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
LINE = 'USER: <image>\\n<prompt> "now" {{ 1 }} ASSISTANT:'


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("contents", "rendered"),
    [
        ([[PICTURE, words("what")]], 'USER: <image>\nwhat "now" {{ 1 }} ASSISTANT:'),
        ([[words("a"), PICTURE, words("b")]], 'USER: <image>\nab "now" {{ 1 }} ASSISTANT:'),
        (["be brief", [PICTURE, words("what")]], 'USER: <image>\nbe brief\nwhat "now" {{ 1 }} ASSISTANT:'),
        (["only words"], "only words"),
        ([[words("only words")]], "only words"),
        ([None, "a {{ 2 }}"], "\na {{ 2 }}"),
    ],
)
def test_the_line_stands_around_the_words(contents: list[Any], rendered: str) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    made = jinja2.Environment().from_string(jinja(LINE)).render(messages=messages)
    assert made == rendered


SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TEMPLATES = {
    "of the tiny model": CHAT_TEMPLATE,
    "blanks at both ends": "\n  {% for message in messages %}  {{ message['role'] }}  {% endfor %}  \n\n",
    "a macro": "{% macro say(x) %}{{ x }}{% endmacro %}\n{% set a = 1 %}{{ say(messages | length) }}{{ a }}",
    "a block last": "{% if messages %}\n  x\n{% endif %}\n",
}


def rendered(template: str, contents: list[Any]) -> str:
    """With the settings of transformers and of the frontend."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": content} for content in contents]
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_with_input_audio_is_left_empty_and_no_other(kind: str) -> None:
    template = TEMPLATES[kind]
    guarded = without_input_audio(template)
    for contents in ([], ["a"], [None, "a"], [[words("a"), PICTURE]], ["a", [words("input_audio")]]):
        assert rendered(guarded, contents) == rendered(template, contents)
    for contents in ([[SOUND]], [[words("a"), SOUND]], [[SOUND], "a", [words("b")]]):
        assert rendered(guarded, contents) == ""


def test_template_of_a_model_is_the_one_the_frontend_takes(tmp_path: Path) -> None:
    assert of_model(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    assert of_model(tmp_path) is None, "several by name"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "in the config"}))
    assert of_model(tmp_path) == "in the config"
    (tmp_path / "chat_template.json").write_text("broken")
    assert of_model(tmp_path) == "in the config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "in a file of JSON"}))
    assert of_model(tmp_path) == "in a file of JSON"
    (tmp_path / "chat_template.jinja").write_text("in a file of its own")
    assert of_model(tmp_path) == "in a file of its own"
