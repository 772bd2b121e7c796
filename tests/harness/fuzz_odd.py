"""Odd values for a fuzz test, and what can be made wrong in a body with them."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]
JsonPath = tuple[str | int, ...]

SMALL = st.integers(0, 8)
FIGURES = [
    *(-1, 0, 1, 2, 20, 21, 127, 128, 129, 999, 1000, 4096, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1),
    *(2**63, 2**64, -(2**31) - 1, -(2**63) - 1, 10**30, -1e-9, 1e-9, 0.5, 1.5, 1e308, -1e308, 5e-324),
    *(math.nan, math.inf, -math.inf),
]
TEXTS = [
    *("", " ", "\x00", "\x1b[2J", "\ud800", "\udfff\ud800", "\u202e", "\ufeff", "\r\n\r\n", "a" * 9, "é́" * 3),
    *("{{ 7*7 }}", "{% for i in range(9**9) %}a{% endfor %}", "<|im_end|>", "</think>", "null", "NaN", "-0"),
    *(
        "../../etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:1/",
        "http://[::1",
        "data:image/png;base64,",
    ),
    *("data:image/png;base64,iVBORw0KGgo=", "data:,", "%00", "😀" * 5, "x" * 2000, "y" * 100_000),
]
NUMBERS = st.sampled_from(FIGURES) | st.integers(-5, 300) | st.floats(0, 2)
WORDS = st.text(max_size=12) | st.sampled_from(TEXTS)
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def nested(levels: int, as_object: bool) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if as_object else [value]
    return value


DEEP = st.builds(nested, st.sampled_from([5, 49, 60, 120, 130, 500]), st.booleans())
MANY = st.builds(
    lambda one, count: [one] * count,
    LEAVES.filter(lambda x: x not in TEXTS),
    st.sampled_from([5, 300, 20_000]),
)
KEYS = st.builds(lambda count: {f"k{i}": i for i in range(count)}, st.sampled_from([20, 600, 5000]))
ODD = ANY | DEEP | MANY | KEYS
NAMES = [
    *("kv_transfer_params", "prompt_embeds", "chat_template", "extra_args", "request_id", "best_of", "echo"),
    *("use_beam_search", "length_penalty", "guided_decoding_backend", "mm_processor_kwargs", "priority"),
    *("media_io_kwargs", "add_generation_prompt", "continue_final_message", "documents", "__proto__", "lora"),
    *("input_reference", "response_format", "output_format", "nvext", "tools", "tool_choice", "messages"),
]
"""Of fields that a mutation adds."""


def places(value: Any, above: JsonPath = ()) -> list[JsonPath]:
    """The way to everything inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[JsonPath] = []
    for key, inner in list(inside)[:20]:
        found += [(*above, key), *places(inner, (*above, key))]
    return found


@st.composite
def mutated(draw: st.DrawFn, bodies: st.SearchStrategy[Body]) -> Any:
    """A body in which up to three values are others, gone, or called something else."""
    body: Any = copy.deepcopy(draw(bodies))
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        ways = places(body)
        if not ways:
            return draw(ODD)
        *above, last = draw(st.sampled_from(ways))
        holder = body
        for key in above:
            holder = holder[key]
        match draw(st.sampled_from(["other", "other", "gone", "wrapped", "beside"])):
            case "other":
                holder[last] = draw(ODD)
            case "gone":
                del holder[last]
            case "wrapped":
                holder[last] = [holder[last]]
            case "beside" if isinstance(holder, dict):
                holder[draw(st.sampled_from(NAMES) | WORDS)] = draw(ODD)
    return body


@st.composite
def as_json(draw: st.DrawFn, bodies: st.SearchStrategy[Any]) -> bytes:
    """Written out; now and then broken, with a key twice, or followed by more."""
    text = json.dumps(draw(bodies), ensure_ascii=draw(st.booleans()))
    raw = text.encode("utf-8", "surrogatepass")
    match draw(st.sampled_from(["whole"] * 30 + ["cut", "twice", "byte", "more", "bom", "deep"])):
        case "cut":
            return raw[: draw(st.integers(0, len(raw)))]
        case "twice" if raw.startswith(b'{"'):
            key = raw[1 : raw.index(b":")]
            return b"{" + key + b": " + json.dumps(draw(LEAVES)).encode() + b", " + raw[1:]
        case "byte":
            at = draw(st.integers(0, len(raw)))
            return raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at:]
        case "more":
            return raw + b" " + raw
        case "bom":
            return b"\xef\xbb\xbf" + raw
        case "deep":
            return b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return raw
