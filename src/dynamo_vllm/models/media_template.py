"""A chat template from a line with the model's marks in it, for models whose own has no place for media."""

from __future__ import annotations

import json

PROMPT = "<prompt>"

_TEMPLATE = """\
{%- set seen = namespace(media=false) -%}
{%- for message in messages if message['content'] and message['content'] is not string -%}
{%- for part in message['content'] if part['type'] != 'text' -%}
{%- set seen.media = true -%}
{%- endfor -%}
{%- endfor -%}
{%- if seen.media -%}
{{- @BEFORE@ -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not loop.first -%}
{{- '\\n' -}}
{%- endif -%}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if seen.media -%}
{{- @BEHIND@ -}}
{%- endif -%}
"""


def jinja(line: str) -> str:
    """`line` around the words of all messages; a request without media has its words alone.

    A mark in the line would otherwise stand in a prompt that has nothing to put there.
    """
    before, _, behind = line.replace("\\n", "\n").partition(PROMPT)
    return _TEMPLATE.replace("@BEFORE@", _written(before)).replace("@BEHIND@", _written(behind))


def _written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
