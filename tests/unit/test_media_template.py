"""The chat template made of --mm-prompt-template, rendered."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from dynamo_vllm.models.media_template import jinja

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
