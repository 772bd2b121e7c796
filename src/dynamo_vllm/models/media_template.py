"""Creates chat templates for the frontend: with placeholders for media, or detecting `input_audio`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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

# The frontend (1.6.1) passes these parts only to the template. The expressions at both ends keep the text
# between them from being trimmed.
_BEFORE_AUDIO = """\
{%- set dropped = namespace(audio=false) -%}
{%- for message in messages if message['content'] and message['content'] is not string -%}
{%- for part in message['content'] if part['type'] == 'input_audio' -%}
{%- set dropped.audio = true -%}
{%- endfor -%}
{%- endfor -%}
{%- if not dropped.audio %}{{ '' }}"""
_BEHIND_SOUND = "{{ '' }}{% endif %}"


def jinja(line: str) -> str:
    """Return a template with `line` around the text of all messages; without media it is the text alone.

    Otherwise a placeholder would be in a prompt without media.
    """
    before, _, behind = line.replace("\\n", "\n").partition(PROMPT)
    return _TEMPLATE.replace("@BEFORE@", _written(before)).replace("@BEHIND@", _written(behind))


def _written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def without_input_audio(template: str) -> str:
    """Return `template`, but rendering nothing for a chat with an `input_audio` part: an empty prompt can be
    refused."""
    return _BEFORE_AUDIO + template.removesuffix("\n") + _BEHIND_SOUND


def of_model(folder: Path) -> str | None:
    """Return the model's one chat template; None if it has none, or several by name."""
    if (written := folder / "chat_template.jinja").is_file():
        return written.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            held = json.loads((folder / name).read_bytes()).get("chat_template")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(held, str):
            return held
    return None
