"""Puts made models into the package, from where `dynamo-vllm serve` takes them and the wheel carries them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "dynamo_vllm" / "models" / "demo"
NAMES = ("chat", "lora-capitals", "lora-chinese", "vision", "image", "embed", "rerank", "speech")
PREFIX = "demo-"
PAGE = Path(__file__).parents[2] / "docs" / "demo.md"
BEGIN, END = "<!-- scores:begin -->\n", "<!-- scores:end -->"
MAX_BYTES = 72_000_000
"""Of all of them, with their cards."""


def install(made: Path, into: Path = PACKAGE) -> list[Path]:
    """Copy each demo model that lies in `made`; the others stay as they are."""
    found = [name for name in NAMES if (made / f"{PREFIX}{name}").is_dir()]
    if not found:
        raise SystemExit(f"{made} holds no demo model; make them with 'python scripts/demo all --out {made}'")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=into) as scratch:
        copies = {name: shutil.copytree(made / f"{PREFIX}{name}", Path(scratch, name)) for name in found}
        kept = [into / name for name in NAMES if name not in found and (into / name).is_dir()]
        total = sum(map(size, [*copies.values(), *kept]))
        if total > MAX_BYTES:
            raise SystemExit(
                f"the demo models have {total / 1e6:.1f} MB; {MAX_BYTES / 1e6:.0f} MB are allowed"
            )
        for name, copy in copies.items():
            shutil.rmtree(into / name, ignore_errors=True)
            copy.rename(into / name)
    return [into / name for name in found]


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def scores(package: Path = PACKAGE) -> str:
    """The scores of every model in the package, as its card has them."""
    parts = []
    for name in NAMES:
        if (package / name).is_dir():
            card = (package / name / "README.md").read_text(encoding="utf-8")
            section = card.partition("## Scores\n")[2].partition("\n## ")[0]
            parts.append(f"### {PREFIX}{name}\n{section.strip()}\n")
    return "\n".join(parts)


def write_scores(page: Path = PAGE, package: Path = PACKAGE) -> None:
    """Into the documentation, between its marks."""
    text = page.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}{scores(package)}{END}{after}", encoding="utf-8")
