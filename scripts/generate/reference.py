"""Creates the text of docs/cli.md from the help of every command."""

from __future__ import annotations

import contextlib
import io
import os

from dynamo_vllm.cli import bench
from dynamo_vllm.cli import main as commands
from dynamo_vllm.cli.gateway import keys
from dynamo_vllm.cli.running import admin

COLUMNS = "104"
HEAD = """# Command line

<!-- Written by `make docs` from the code; edit the declarations there, not this page. -->

What `--help` prints for each command; a group of options that stands further up already is named only.
[Configuration](configuration.md) has the same options as tables, [errors](errors.md#exit-codes) the exit
codes.
"""
PAGES = {
    "serve": "serve.md",
    "worker": "architecture.md",
    "frontend": "requests.md",
    "check": "operations.md",
    "status": "operate.md#what-status-shows",
    **dict.fromkeys(("processes", "restart", "drain", "scale"), "operate.md#processes-of-a-serve"),
    "chat": "start.md",
    "bench": "bench.md",
    "export": "kubernetes.md",
    "size": "sizing.md",
    "lora": "lora.md",
    "console": "console.md",
    "gateway": "gateway.md",
    "keys": "gateway.md#keys",
    "usage": "gateway.md#usage",
}
"""The page that explains a command; the others are in operate.md."""


def page() -> str:
    parts = [HEAD]
    shown: dict[str, str] = {}
    for words in ((), *((name, *rest) for name in commands.COMMANDS for rest in below(name))):
        command = " ".join(("dynamo-vllm", *words))
        parts += [f"## `{command}`\n", *explained(words)]
        parts.append(f"```text\n{shortened(asked(words), command, shown)}\n```\n")
    return "\n".join(parts)


def below(name: str) -> list[tuple[str, ...]]:
    """Return the words that may follow a command's name, with the empty choice."""
    words = [command.split()[1] for command in admin.COMMANDS if command.startswith(f"{name} ")]
    words += bench.KINDS if name == "bench" else ()
    words += keys.COMMANDS if name == "keys" else ()
    return [(), *((word,) for word in words)]


def explained(words: tuple[str, ...]) -> list[str]:
    if not words:
        return []
    target = PAGES.get(words[0], "operate.md#what-can-be-asked")
    return [f"Explained in [{target.partition('#')[0].removesuffix('.md')}]({target}).\n"]


def asked(words: tuple[str, ...]) -> str:
    """Return what the command prints, at a fixed width."""
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            commands.run([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS")
    return printed.getvalue().strip()


def shortened(text: str, command: str, shown: dict[str, str]) -> str:
    """Return the text without groups of options that are the same as an earlier command's."""
    kept = []
    for group in text.split("\n\n"):
        name, colon, options = group.partition(":\n")
        if not colon or not options.startswith("  -"):
            kept.append(group)
        elif name != "options":  # only --help is there
            first = shown.setdefault(group, command)
            kept.append(group if first == command else f"{name}:\n  as of '{first}'")
    return "\n\n".join(kept)
