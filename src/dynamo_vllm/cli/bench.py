"""Runs `dynamo-vllm bench KIND`: imports and runs the module of that measurement."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dynamo_vllm.cli.process import clean_up_at_termination
from dynamo_vllm.config import build
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROG = "dynamo-vllm bench"
# Each module has add_arguments(parser) and run(options) -> exit code.
KINDS = {
    "load": ("dynamo_vllm.bench.load.command", "send requests to an OpenAI server and measure its answers"),
    "pooling": ("dynamo_vllm.bench.load.pooling", "measure embeddings or scored pairs per second of servers"),
    "plane": ("dynamo_vllm.bench.local.plane", "measure everything around the engine, with a fake engine"),
    "routing": ("dynamo_vllm.bench.local.routing", "replay a trace over several workers, once per router"),
    "scale": ("dynamo_vllm.bench.local.scale", "measure many workers and frontends, without engines"),
}


def usage() -> str:
    lines = [f"usage: {PROG} KIND [OPTIONS]", "", "Measure.", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in KINDS.items()]
    return "\n".join([*lines, "", "  KIND --help  options of a kind"])


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in KINDS:
        raise ConfigError(f"bench: {argv[0]!r} is unknown; choose one of {', '.join(KINDS)}")
    name, about = KINDS[argv[0]]
    kind = importlib.import_module(name)
    parser = build.Parser(
        prog=f"{PROG} {argv[0]}",
        usage=f"{PROG} {argv[0]} [OPTIONS]",
        description=about[:1].upper() + about[1:] + ".",
        allow_abbrev=False,
        formatter_class=build.HelpFormatter,
    )
    kind.add_arguments(parser)
    clean_up_at_termination()
    return int(kind.run(parser.parse_args(list(argv[1:]))))
