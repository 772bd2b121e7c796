"""Defines the pages of the site and their order, and converts the repository's pages for it."""

from __future__ import annotations

import posixpath
import shutil
from pathlib import Path

from docs_site import markdown

ROOT = Path(__file__).parents[2]
HOME = "README.md"
NAVIGATION: dict[str, dict[str, str]] = {
    "Start": {
        "docs/start.md": "Five minutes",
        "docs/serve.md": "Serve on one machine",
        "docs/demo.md": "The demo models",
        "docs/from-dynamo-vllm.md": "From python -m dynamo.vllm",
    },
    "Capabilities": {
        "docs/requests.md": "Requests",
        "docs/gateway.md": "The gateway",
        "docs/agents.md": "Agents and libraries",
        "docs/search.md": "Search: embeddings, reranking",
        "docs/routing.md": "Routing and migration",
        "docs/disaggregation.md": "Disaggregated prefill and decode",
        "docs/kv-tiers.md": "KV caches in host memory and on disk",
        "docs/data-parallel.md": "Ranks and nodes",
        "docs/lora.md": "LoRA adapters",
        "docs/multimodal.md": "Images, video, audio",
        "docs/multimodal-encoder.md": "Encode workers",
        "docs/media.md": "Media limits",
        "docs/omni.md": "Image models (vLLM-Omni)",
        "docs/prompt-embeddings.md": "Prompt embeddings",
    },
    "Deploy": {
        "docs/cluster.md": "etcd, NATS and other planes",
        "docs/hosts.md": "Several hosts",
        "docs/kubernetes.md": "Kubernetes",
        "docs/containers.md": "Containers",
        "docs/sizing.md": "Sizing GPU memory",
        "deploy/README.md": "Deployment files",
        "deploy/recipes/README.md": "Recipes",
        "deploy/*/README.md": "",
        "deploy/**/*.md": "",
    },
    "Operate": {
        "docs/console.md": "The web console",
        "docs/operate.md": "Operator commands",
        "docs/operations.md": "Troubleshooting",
        "docs/observability.md": "Metrics, alerts, traces",
        "docs/errors.md": "Errors and exit codes",
        "docs/security.md": "Security",
        "docs/faults.md": "Attacks and faults, measured",
    },
    "Reference": {
        "docs/cli.md": "Command line",
        "docs/configuration.md": "Configuration",
        "docs/performance.md": "Performance",
        "docs/bench.md": "Benchmarks",
    },
    "Project": {
        "docs/architecture.md": "Architecture",
        "docs/decisions.md": "Decisions",
        "docs/versions.md": "Versions of vLLM",
        "docs/adding-a-connector.md": "Adding a connector",
        "docs/adding-a-verb.md": "Adding a verb",
        "docs/adding-a-media-type.md": "Adding a media type",
        "docs/adding-a-patch.md": "Adding a patch",
        "CONTRIBUTING.md": "Contributing",
        "SECURITY.md": "Reporting a vulnerability",
        "CHANGELOG.md": "Changelog",
        "scripts/*/README.md": "",
        "packages/*/README.md": "",
    },
}
"""Pages and patterns by section, with their navigation titles; an empty title means the page's heading.
A page that does not exist is left out, and so are links to it."""


def navigation(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Return the sections with their existing pages, each page once, and their titles."""
    seen: set[str] = set()
    sections = {}
    for section, wanted in NAVIGATION.items():
        found: dict[str, str] = {}
        for pattern, title in wanted.items():
            for path in sorted(root.glob(pattern)):
                page = path.relative_to(root).as_posix()
                if page not in seen:
                    seen.add(page)
                    found[page] = title or (markdown.title(path.read_text()) or page).replace("`", "")
        if found:
            sections[section] = found
    return sections


def pages(root: Path = ROOT) -> list[str]:
    """Return the path of every page, relative to the root of the repository."""
    return [HOME, *(page for found in navigation(root).values() for page in found)]


def stage(folder: Path, root: Path = ROOT) -> None:
    """Copy the pages, and the files they link to, into a folder for the builder."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in pages(root):
        text = (root / page).read_text()
        _write(folder / page, markdown.with_links(text, _changes(page, text, folder, root)))
    home = folder / HOME
    home.rename(folder / "index.md")
    (folder / "index.md").write_text((folder / "index.md").read_text() + contents(root))


def contents(root: Path = ROOT) -> str:
    """Return the navigation in the builder's syntax."""
    parts = []
    for section, found in navigation(root).items():
        entries = [f"{title} <{page.removesuffix('.md')}>" for page, title in found.items()]
        parts += ["", "```{toctree}", ":hidden:", f":caption: {section}", "", *entries, "```"]
    return "\n".join(parts) + "\n"


def is_left_out(page: str, root: Path = ROOT) -> bool:
    """Return whether the navigation names a page that does not exist."""
    return not (root / page).exists() and any(page in wanted for wanted in NAVIGATION.values())


def _changes(page: str, text: str, folder: Path, root: Path) -> dict[str, str | None]:
    """Return new targets for links to the home page, folders and missing pages; copy linked files."""
    change: dict[str, str | None] = {}
    for _, target in markdown.links(text):
        path, mark, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            continue
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if place == HOME:
            change[target] = posixpath.join(posixpath.dirname(path), "index.md") + mark + anchor
        elif (root / place).is_dir():
            change[target] = posixpath.join(path, _show_folder(place, folder, root)) + mark + anchor
        elif is_left_out(place, root):
            change[target] = None
        elif not place.endswith(".md"):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / place, folder / place)
    return change


def _show_folder(place: str, folder: Path, root: Path) -> str:
    """Return the page for a folder: its README, or a new page that shows its files."""
    if (root / place / HOME).is_file():
        return HOME
    lines = ["---", "orphan: true", "---", "", f"# `{place}`"]
    for file in sorted(path for path in (root / place).iterdir() if path.is_file()):
        language = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash"}.get(file.suffix, "text")
        lines += ["", f"## `{file.name}`", "", f"````{language}", file.read_text().rstrip(), "````"]
    _write(folder / place / "files.md", "\n".join(lines) + "\n")
    return "files.md"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
