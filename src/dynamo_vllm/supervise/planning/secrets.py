"""Keeps secrets out of command lines, which every user of a machine can read, by passing them as
variables.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dynamo_vllm.config import build

if TYPE_CHECKING:
    from collections.abc import Sequence

_OF_VLLM = {"--hf-token": "HF_TOKEN", "--hf_token": "HF_TOKEN"}
_IN_ADDRESS = re.compile(r"://[^/\s]+@")


def by_environment(cls: type, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a process with the options of `cls`, and the variables for what it leaves
    out.

    It leaves out secrets, and addresses with a user name or a password.
    """
    ours = {name: item for item in build.declared(cls) if not item.many for name in item.flags}
    kept: list[str] = []
    found: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, has_value, value = word.partition("=")
        is_apart = not has_value and bool(words) and not words[0].startswith("-")
        if is_apart:
            value = words[0]
        variable = _OF_VLLM.get(name)
        if name in ours and (ours[name].option.secret or _IN_ADDRESS.search(value)):
            variable = ours[name].option.env
        if variable is None or not value:
            kept.append(word)
            continue
        found[variable] = value
        if is_apart:
            words.pop(0)
    return kept, found
