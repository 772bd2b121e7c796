"""Writes the files in deploy/k8s and deploy/compose, for `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.cli import export
from dynamo_vllm.export import yaml_files

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
EXAMPLES: dict[str, tuple[str, ...]] = {
    "k8s/aggregated": ("--name", "qwen"),
    "k8s/kv-router": ("--name", "qwen-kv", "--frontends", "2"),
    "k8s/disaggregated": ("--name", "qwen-pd"),
    "k8s/data-parallel": ("--name", "qwen-dp", "--cache-gb", "500", "--start-seconds", "3600"),
    "k8s/lora": ("--name", "qwen-lora"),
    "k8s/multimodal": ("--name", "qwen-vl"),
    "k8s/omni": ("--name", "draw", "--image", "dynamo-vllm:0.3.0.dev0-cuda-omni"),
    "k8s/gateway": (
        *("--name", "qwen-keys", "--frontends", "2", "--gateways", "2"),
        *("--gateway-api", "infra/public", "--hostname", "models.example.com"),
        *("--image", "dynamo-vllm:0.3.0.dev0-cuda-postgres"),
    ),
    "k8s/operator": ("--name", "qwen-graph", "--operator"),
    "compose/aggregated": (),
    "compose/disaggregated": (),
    "compose/gateway": (),
    "compose/prompt-embeds": ("--device", "cpu"),
}
"""Folders with a serve.yaml, and further options of their export."""


def command(folder: str) -> list[str]:
    """Return the command for the root of the repository."""
    kind, below = folder.split("/")[0], f"deploy/{folder}"
    return [kind, "--config", f"{below}/serve.yaml", "-o", below, *EXAMPLES[folder]]


def texts(folder: str) -> dict[str, str]:
    argv = command(folder)
    kind, options = export.understand(argv, {})
    return export.export(kind, options, export.shown(argv), ROOT)[0]


def main(argv: Sequence[str]) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: PYTHONPATH=scripts python -m generate.manifests [--check]", file=sys.stderr)
        return 2
    old = [path for folder in EXAMPLES for path in (stale if argv else write)(folder)]
    for path in old:
        print(f"error: {path} is not what the code makes; run 'make docs'", file=sys.stderr)
    return int(bool(old))


def write(folder: str) -> list[str]:
    """Write the files, and remove those that only an earlier version wrote."""
    place = ROOT / "deploy" / folder
    for left in yaml_files.write(place, texts(folder), force=True, beside=place / "serve.yaml"):
        (place / left).unlink()
    return []


def stale(folder: str) -> list[str]:
    place, wanted = ROOT / "deploy" / folder, texts(folder)
    there = {path.name for path in place.iterdir() if yaml_files.is_ours(path)}
    different = [name for name in wanted if name in there and (place / name).read_text() != wanted[name]]
    return [f"deploy/{folder}/{name}" for name in sorted({*different, *(there ^ wanted.keys())})]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
