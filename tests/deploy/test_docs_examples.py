"""What the documentation tells readers to type is understood: commands, files, flags, variables.

Commands are lines of shell blocks, and code in the text, that begin with `dynamo-vllm`. What they may leave
open: a line with "…", and one that shows a choice (`load|unload`, `[MODEL]`), is no command; a capital letter
alone stands for a number; a file that is not in the repository is taken as read. A command that the text
names without a flag (`dynamo-vllm lora load`) is spoken of, not typed.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_site import markdown, pages
from docs_site.markdown import Block
from generate import docs

from dynamo_vllm.cli import bench, check
from dynamo_vllm.cli.main import ADMIN, COMMANDS, PROCESSES
from dynamo_vllm.cli.running import admin, deployment, processes, status
from dynamo_vllm.cli.running.chat import ChatOptions
from dynamo_vllm.cli.start import serve
from dynamo_vllm.config import build, checks, worker_plan
from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.supervise.planning import demos, plan

PAGES = pages.pages()
SHELL = {"", "bash", "sh", "console"}
A_FILE = "deploy/serve/two-workers.yaml"
REFUSED = ("--connector lmcache",)
"""Shown in order to say that it is refused."""
OF_THE_MACHINE = ("is not installed", "into this machine's memory")
"""Refusals that depend on where the test runs."""
_FILE = re.compile(r"(?:[a-z_][\w.-]*/)+[a-z][\w-]*\.(?:py|md|svg|sh)")
_PROMPT = re.compile(r"^\S*\$ ")
_COMMAND = re.compile(r"^(?:[A-Z_0-9]+=\S* )*(?:\.venv/bin/)?dynamo-vllm (?P<words>.+)$")
_MAKE = re.compile(r"^make serve(?: MODEL=(?P<model>\S+))?(?: ARGS='(?P<args>.*)')?$")


@dataclass(frozen=True)
class Line:
    page: str
    number: int
    words: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"


def lines_of(page: str, text: str) -> Iterator[Line]:
    """Commands of a page, as a shell would see them."""
    for block in markdown.blocks(text):
        if block.language in SHELL:
            yield from _lines_of_block(page, block)
    for number, piece in markdown.code(text):
        words = words_of(piece)
        if words and " -" in words:
            yield Line(page, number, words)


def _lines_of_block(page: str, block: Block) -> Iterator[Line]:
    variables: dict[str, str] = {}
    for number, line in enumerate(block.text.replace("\\\n", "  ").splitlines(), block.line):
        typed = _PROMPT.sub("", line)
        for name, value in variables.items():
            typed = re.sub(rf"\${name}\b", value.replace("\\", ""), typed)
        if assigned := re.match(r'^([A-Z])="(.*)"$', typed):
            variables[assigned[1]] = assigned[2]
        elif words := words_of(typed):
            yield Line(page, number, words)


def words_of(typed: str) -> str | None:
    """The words behind `dynamo-vllm`, None where this is no command or leaves something open."""
    made, command = _MAKE.match(typed), _COMMAND.match(typed)
    if made:
        words = f"serve {made['model'] or ''} {made['args'] or ''}"
    elif command:
        words = command["words"]
    else:
        return None
    words = re.split(r" (?:\||>|&&|&|2>)(?: |$)", words)[0]
    return None if "…" in words or re.search(r"(?<!['\"])\[|\w\|\w|\$", words) else words


def argv_of(words: str) -> list[str]:
    found = shlex.split(words, comments=True)
    return ["1" if re.fullmatch("[A-Z]", word) else word for word in found]


ALL = [line for page in PAGES for line in lines_of(page, (pages.ROOT / page).read_text())]


def test_commands_are_understood(tmp_path: Path) -> None:
    assert len(ALL) > 50
    assert {argv_of(line.words)[0] for line in ALL} >= {"serve", "worker", "check", "status", "lora", "bench"}
    for line in ALL:
        is_refused = any(words in line.words for words in REFUSED)
        try:
            understand(argv_of(line.words), tmp_path)
        except ConfigError as error:
            assert is_refused or any(words in str(error) for words in OF_THE_MACHINE), f"{line}: {error}"
        else:
            assert not is_refused, line


# --- one reader per command, its own parser and rules -----------------------------------------------------


def understand(argv: list[str], folder: Path) -> None:
    """Raises ConfigError where the command would refuse these words."""
    name, *rest = argv
    if name in ("--version", "--help") or rest in (["--help"], [*rest[:1], "--help"]):
        return
    if name not in COMMANDS:
        raise ConfigError(f"{name} is no command")
    module = COMMANDS[name][0]
    if module == ADMIN:
        read_admin(argv)
    elif module == PROCESSES:
        processes.understand(name, rest, {})
    elif name in READERS:
        READERS[name](rest, folder)
    else:
        read_other(name, importlib.import_module(module), rest)


def read_serve(argv: list[str], folder: Path) -> None:
    if "--config" in argv:
        place = argv.index("--config") + 1
        named = pages.ROOT / argv[place]
        argv[place] = str(named if named.exists() else pages.ROOT / A_FILE)
    options, wanted = serve.understand(argv, {})
    gpus = [str(number) for number in range(8)]
    if demos.lacks_model(wanted, {}):
        if (options.demo or demos.DEFAULT) not in demos.DEMOS:
            raise ConfigError(f"--demo {options.demo} is unknown")
        if options.demo is not None:
            return
        _, wanted = serve.understand([str(folder), *argv], {})
    plan.make(wanted, {}, folder / "discovery", gpus)


def read_worker(argv: list[str], folder: Path) -> None:
    checks.check_worker(worker_plan.parse(argv, {}))


def read_frontend(argv: list[str], folder: Path) -> None:
    options, rest = build.parse(FrontendOptions, argv, {}, "frontend", "")
    refuse(rest)
    checks.check_frontend(options)


def read_check(argv: list[str], folder: Path) -> None:
    options, rest = build.parse(check.CheckOptions, argv, {}, "check", "")
    if options.live is not None:
        refuse(build.parse(check.LiveOptions, rest, {}, "check", "")[1])
        return
    for problem in check.refusals(worker_plan.parse(rest, {})):
        raise ConfigError(problem)


def read_status(argv: list[str], folder: Path) -> None:
    options, rest = status.understand(argv, {})
    refuse(rest)
    checks.check_find(options)


def read_chat(argv: list[str], folder: Path) -> None:
    refuse(build.parse(ChatOptions, deployment.with_url_flag(argv), {}, "chat", "")[1])


def read_bench(argv: list[str], folder: Path) -> None:
    kind, *rest = argv
    if kind not in bench.KINDS:
        raise ConfigError(f"bench {kind} is unknown")
    parser = build.Parser(allow_abbrev=False)
    importlib.import_module(bench.KINDS[kind][0]).add_arguments(parser)
    parser.parse_args(rest)


def read_admin(argv: list[str]) -> None:
    name, rest = admin.named(argv)
    if name is not None:
        admin.understand(name, admin.COMMANDS[name], rest, {})


def read_other(name: str, module: Any, argv: list[str]) -> None:
    """A command of which this file knows no more than its options; other words may stand beside them."""
    if hasattr(module, "understand"):
        module.understand(argv, {})
        return
    cls = next(cls for section, cls, _ in docs.SECTIONS if section.split()[0] == name)
    _, rest = build.parse(cls, argv, {}, name, "")
    refuse([word for word in rest if word.startswith("-")])


def refuse(rest: list[str]) -> None:
    if rest:
        raise ConfigError(f"{rest[0]} is too much")


READERS: dict[str, Callable[[list[str], Path], None]] = {
    "serve": read_serve,
    "worker": read_worker,
    "frontend": read_frontend,
    "check": read_check,
    "status": read_status,
    "chat": read_chat,
    "bench": read_bench,
}


WRONG = """\
serv
serve MODEL --prefill 1
serve MODEL other
serve --demo nothing
worker --model MODEL --connector nope
frontend --nope
check --live URL --nope
status --nope
chat --nope
bench nope
bench load --nope
lora load NAME
lora nope
sleep --level 3
"""


def test_wrong_commands_are_found(tmp_path: Path) -> None:
    for words in WRONG.splitlines():
        with pytest.raises(ConfigError):
            understand(argv_of(words), tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```\n$ dynamo-vllm status --watch\nURL  ready\n```", [["status", "--watch"]]),
        ("```bash\nA=1 dynamo-vllm serve \\\n  MODEL   # why\n```", [["serve", "MODEL"]]),
        ('```\nR="--model M"\n10.0.0.1$ dynamo-vllm worker $R\n```', [["worker", "--model", "1"]]),
        ("`make serve ARGS='--demo lora'`", [["serve", "--demo", "lora"]]),
        ("`dynamo-vllm serve --demo chat | tee log`", [["serve", "--demo", "chat"]]),
        ("```text\ndynamo-vllm serve\n```", []),
        ("`dynamo-vllm serve [MODEL]`, `dynamo-vllm lora load|unload`, `dynamo-vllm serve …`", []),
        ("`dynamo-vllm lora load` loads one", []),
    ],
)
def test_commands_are_found_as_a_shell_would_see_them(text: str, found: list[list[str]]) -> None:
    assert [argv_of(line.words) for line in lines_of("page.md", text)] == found


# --- files and code ---------------------------------------------------------------------------------------


def blocks(*languages: str) -> Iterator[tuple[str, Block]]:
    for page in PAGES:
        for block in markdown.blocks((pages.ROOT / page).read_text()):
            if block.language in languages:
                yield f"{page}:{block.line}", block


def test_data_and_python_are_well_formed() -> None:
    """An ellipsis in the place of a value stands for one."""
    for place, block in blocks("yaml", "json", "python"):
        text = re.sub(r"(?<=: )…", "0", block.text)
        if block.language == "python":
            compile(block.text, place, "exec")
        else:
            assert list(yaml.safe_load_all(text)) if block.language == "yaml" else json.loads(text), place


def test_bodies_that_curl_sends_are_json() -> None:
    for place, block in blocks(*SHELL):
        for body in re.findall(r" -d '(.*?)'", block.text, re.DOTALL):
            assert "…" in body or json.loads(body), place


def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        path = pages.ROOT / page
        roots = (pages.ROOT, pages.ROOT / "src" / "dynamo_vllm", pages.ROOT / "src", path.parent)
        named = [piece for _, piece in markdown.code(path.read_text()) if _FILE.fullmatch(piece)]
        assert [name for name in named if not any((root / name).exists() for root in roots)] == [], page
