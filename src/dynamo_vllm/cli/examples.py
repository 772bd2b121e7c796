"""`python -m dynamo_vllm.cli.examples [--check]`: fills in the answers of `dynamo-vllm size` that pages show."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.cli import size
from dynamo_vllm.config import build
from dynamo_vllm.config.options import SizeOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing import files

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(r"^```console\n\$ dynamo-vllm size (?P<words>[^\n]*)\n.*?^```$", re.M | re.S)


def main(argv: Sequence[str]) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: python -m dynamo_vllm.cli.examples [--check]", file=sys.stderr)
        return 2
    stale = [path for path in pages(ROOT) if path.read_text() != filled(path.read_text(), ROOT)]
    for path in stale:
        if argv:
            print(f"error: {path.relative_to(ROOT)} shows old answers; run 'make docs'", file=sys.stderr)
        else:
            path.write_text(filled(path.read_text(), ROOT))
    return 1 if argv and stale else 0


def pages(root: Path) -> list[Path]:
    """The pages of a checkout that may have such blocks."""
    return [*sorted(root.glob("docs/*.md")), *sorted(root.glob("deploy/recipes/*/README.md"))]


def filled(page: str, root: Path) -> str:
    """The page with today's answers; models are named relative to `root`."""
    return _BLOCK.sub(lambda found: _block(found["words"], root), page)


def _block(words: str, root: Path) -> str:
    return f"```console\n$ dynamo-vllm size {words}\n{_answer(shlex.split(words), root)}\n```"


def _answer(argv: list[str], root: Path) -> str:
    options, rest = build.parse(SizeOptions, ["--model", *argv], {}, size.PROG, "")
    if rest:
        raise ConfigError(f"{rest[0]} is no option of size")
    path = files.find(str(root / str(options.model)), {})
    found = size.answer(size.asked(options, str(path), files.load(path)))
    return "\n".join(size.text(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
