"""Writes the output of `size` into pages, and the manifests of recipes, for `make docs`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.cli import export, size, size_report
from dynamo_vllm.config import build
from dynamo_vllm.config.options import SizeOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.export import yaml_files
from dynamo_vllm.sizing import config_file
from dynamo_vllm.sizing.estimate import estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
RECIPES = "deploy/recipes"
_R1 = (
    "--name",
    "deepseek-r1",
    "--kube-namespace",
    "deepseek-r1",
    "--start-seconds",
    "7200",
    "--shm-gb",
    "64",
)
EXPORTS: dict[str, tuple[str, ...]] = {
    "qwen3-single-gpu": ("--name", "qwen3", "--kube-namespace", "qwen3"),
    "gpt-oss/20b": ("--name", "gpt-oss-20b", "--kube-namespace", "gpt-oss"),
    "gpt-oss/120b": ("--name", "gpt-oss-120b", "--kube-namespace", "gpt-oss"),
    "deepseek-r1/two-nodes": (*_R1, "--worker-memory-gb", "1024"),
    "deepseek-r1/four-nodes": (*_R1, "--worker-memory-gb", "512"),
    "prompt-embeds": ("--name", "prompt-embeds", "--kube-namespace", "prompt-embeds"),
    "lmcache": ("--name", "kv-tiers", "--kube-namespace", "kv-tiers"),
    "omni": ("--name", "omni", "--kube-namespace", "omni", "--image", "dynamo-vllm:0.3.0.dev0-cuda-omni"),
}
"""Folders of recipes with a serve.yaml, and further options of their export."""
_BLOCK = re.compile(r"^```console\n\$ dynamo-vllm size (?P<words>[^\n]*)\n.*?^```$", re.M | re.S)


def main(argv: Sequence[str]) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: PYTHONPATH=scripts python -m generate.examples [--check]", file=sys.stderr)
        return 2
    stale = [path for path in pages(ROOT) if path.read_text() != filled(path.read_text(), ROOT)]
    if argv:
        stale += [ROOT / RECIPES / folder / "k8s" / name for folder in EXPORTS for name in old(folder)]
        for path in stale:
            print(f"error: {path.relative_to(ROOT)} is not of today; run 'make docs'", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(filled(path.read_text(), ROOT))
    for folder in EXPORTS:
        write(folder)
    return 0


# --- pages ----------------------------------------------------------------------------------------------


def pages(root: Path) -> list[Path]:
    """Return the pages of a checkout that may have blocks which begin with `$ dynamo-vllm size`."""
    return [*sorted(root.glob("docs/*.md")), *sorted(root.glob(f"{RECIPES}/*/README.md"))]


def filled(page: str, root: Path) -> str:
    """Return the page with current output; models are named relative to `root`."""
    return _BLOCK.sub(lambda found: _block(found["words"], root), page)


def _block(words: str, root: Path) -> str:
    return f"```console\n$ dynamo-vllm size {words}\n{_answer(shlex.split(words), root)}\n```"


def _answer(argv: list[str], root: Path) -> str:
    options, rest = build.parse(SizeOptions, ["--model", *argv], {}, size.PROG, "")
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of size")
    path = config_file.find(str(root / str(options.model)), {})
    found = estimate(size.size_request(options, str(path), config_file.load(path)))
    return "\n".join(size_report.text(found, options.brief))


# --- manifests ------------------------------------------------------------------------------------------


def command(folder: str) -> list[str]:
    """Return the command for the root of the repository; the recipe's prepare.yaml creates the claim."""
    below = f"{RECIPES}/{folder}"
    argv = ["k8s", "--config", f"{below}/serve.yaml", "-o", f"{below}/k8s"]
    return [*argv, *EXPORTS[folder], "--cache-claim", "model-cache"]


def texts(folder: str) -> dict[str, str]:
    argv = command(folder)
    kind, options = export.understand(argv, {})
    return export.export(kind, options, export.shown(argv), ROOT)[0]


def write(folder: str) -> None:
    """Write the files, and remove those that only an earlier version wrote."""
    place = ROOT / RECIPES / folder
    for left in yaml_files.write(place / "k8s", texts(folder), force=True, beside=place / "serve.yaml"):
        (place / "k8s" / left).unlink()


def old(folder: str) -> list[str]:
    """Return the names of files that differ from what the code writes, are missing, or are left over."""
    place, wanted = ROOT / RECIPES / folder / "k8s", texts(folder)
    there = {path.name: path.read_text() for path in place.glob("*.yaml")}
    return sorted(name for name in {*there, *wanted} if there.get(name) != wanted.get(name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
