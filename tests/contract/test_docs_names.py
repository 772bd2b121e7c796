"""Tests that flags, variables and log lines in the documentation exist in our code or dependencies."""

from __future__ import annotations

import functools
import mmap
import re
from pathlib import Path

import dynamo
import pytest
import vllm
from docs_site import markdown, pages
from generate import docs

from dynamo_vllm.config import build
from harness import messages, upstream_map

PAGES, ROOT = pages.pages(), pages.ROOT
OF_PROGRAMS = {
    "HF_HOME": "huggingface_hub",
    "HF_TOKEN": "huggingface_hub",
    "SSL_CERT_FILE": "OpenSSL",
    "SSL_CERT_DIR": "OpenSSL",
    "LD_LIBRARY_PATH": "the loader",
    "IPC_LOCK": "Linux, a capability",
    "ANTHROPIC_API_KEY": "Claude Code",
    "ENABLE_TOOL_SEARCH": "Claude Code",
}
"""Variables that neither our code nor vLLM nor the runtime names."""
OF_DOCKER = {"--build-arg", "--ipc", "--read-only", "--shm-size", "--tmpfs"}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w…-])")
_VARIABLE = re.compile(r"(?<![\w<{/.])[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9](?![\w…*>.])")
_OURS = re.compile(r"^(?:[A-Z_0-9]+=\S* )*(?:\.venv/bin/)?(?:dynamo-vllm|make|python scripts/\S+) ")


def spoken(page: str) -> list[tuple[str, str]]:
    """Yields flags, variables and our commands in the documentation, with their place."""
    text = (ROOT / page).read_text()
    if page == upstream_map.PAGE:
        text = upstream_map.without_upstream(text)
    found = [(f"{page}:{line}", code) for line, code in markdown.code(text)]
    for block in markdown.blocks(text):
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [(f"{page}:{block.line}", re.sub(r"^\S*\$ ", "", line)) for line in lines]
    return [
        (place, code)
        for place, code in found
        if code.startswith("--") or _OURS.match(code) or re.match(r"[A-Z_0-9]+(?:=\S*)?$", code)
    ]


@functools.cache
def own_text() -> str:
    """Returns all text of this repository that may name a flag or read a variable."""
    files = [
        path for folder in ("src", "scripts", "tests", "packages") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    return "\n".join(path.read_text() for path in (*files, ROOT / "Makefile") if path != Path(__file__))


@functools.cache
def own_words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", own_text()))


@functools.cache
def own_options() -> list[build.Declared]:
    return [item for _, cls, _ in docs.SECTIONS for item in build.declared(cls)]


@functools.cache
def flags() -> frozenset[str]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ours = {flag for item in own_options() for flag in item.flags}
    ours |= {flag.replace("--", "--no-", 1) for flag in ours}
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    # vLLM registers a flag under one spelling and takes dashes and underscores alike.
    theirs = {word.replace("_", "-") for action in parser._actions for word in action.option_strings}
    return frozenset(ours | theirs | {"--help", "--version"})


@functools.cache
def runtime() -> mmap.mmap:
    (library,) = (path for place in dynamo.__path__ for path in Path(place).glob("_core*.so"))
    with library.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def is_in_runtime(text: str) -> bool:
    return runtime().find(text.encode()) >= 0


def is_in_vllm(text: str) -> bool:
    return any(text in source for source in _vllm_sources())


@functools.cache
def _vllm_sources() -> tuple[str, ...]:
    root = Path(vllm.__file__).parent
    parts = ("config", "distributed", "engine", "executor", "multimodal", "platforms", "v1", "worker", "lora")
    files = [path for part in parts for path in (root / part).rglob("*.py")]
    return tuple(path.read_text(errors="replace") for path in (*files, *root.glob("*.py")))


def variable_exists(name: str) -> bool:
    return (
        name in OF_PROGRAMS
        or name.startswith(("NCCL_", "UCX_", "AWS_"))
        or any(name in (item.option.env, *item.option.older_envs) for item in own_options())
        or name in vllm.envs.environment_variables
        or name in own_words()
        or is_in_runtime(name)
    )


def test_flags_in_the_documentation_exist() -> None:
    known = flags() | OF_DOCKER | set(re.findall(r'"(--[a-z0-9-]+)"', own_text()))
    assert [
        f"{place}: {flag}"
        for page in PAGES
        for place, code in spoken(page)
        for flag in _FLAG.findall(code)
        if flag not in known
    ] == []


def test_variables_in_the_documentation_exist() -> None:
    assert [
        f"{place}: {name}"
        for page in PAGES
        for place, code in spoken(page)
        for name in _VARIABLE.findall(code)
        if not variable_exists(name) and (code.startswith(name) or f"{name}=" in code)  # else a placeholder
    ] == []


def test_what_does_not_exist_is_not_found() -> None:
    assert "--no-such-flag" not in flags()
    assert not variable_exists("DYN_NO_SUCH_VARIABLE")
    assert not is_in_vllm("no such line in vLLM, none at all")


@pytest.mark.parametrize(
    ("message", "mark"),
    [found for found in messages.quoted(messages.text()) if found[1] != messages.OURS],
)
def test_messages_of_vllm_and_the_runtime_are_theirs(message: str, mark: str) -> None:
    known = {messages.VLLM: is_in_vllm, messages.RUNTIME: is_in_runtime}[mark]
    assert [piece for piece in messages.pieces(message) if not known(piece)] == []
