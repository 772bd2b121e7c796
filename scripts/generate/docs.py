"""Writes docs/configuration.md and docs/cli.md from the code, for `make docs`; `--check` only compares."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli import main as commands
from dynamo_vllm.cli.check import CheckOptions, LiveOptions
from dynamo_vllm.cli.running.chat import ChatOptions
from dynamo_vllm.cli.running.status import StatusOptions
from dynamo_vllm.config import build, engine_rules
from dynamo_vllm.config.options import (
    AdminOptions,
    ConsoleOptions,
    ExportOptions,
    FrontendOptions,
    GatewayOptions,
    LoadOptions,
    PauseOptions,
    PlaneOptions,
    PoolingBenchOptions,
    ProfileOptions,
    ResetOptions,
    RoutingOptions,
    ScaleOptions,
    ServeOptions,
    SizeOptions,
    SleepOptions,
    WorkerOptions,
)
from dynamo_vllm.config.options.control import ChangeOptions, ControlOptions
from dynamo_vllm.config.options.gateway.keys import (
    CreateKeyOptions,
    DatabaseOptions,
    ListKeysOptions,
    RotateKeyOptions,
    TenantOptions,
)
from dynamo_vllm.config.options.gateway.usage import UsageOptions
from dynamo_vllm.config.options.search import SearchOptions
from generate import reference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
ENGINE_FLAGS = (
    "Every engine flag of vLLM is accepted too and passed on untouched; `vllm serve --help` lists them."
)
ADMIN = "[operate.md](operate.md) explains these commands; all of them take the options below."
PROCESSES = "[operate.md](operate.md#processes-of-a-serve) explains it."
LIKE_LORA = "It takes the options of `lora` too."
SECTIONS: tuple[tuple[str, type, str], ...] = (
    (
        "serve",
        ServeOptions,
        "The model may also be the first argument. Every option of a worker is accepted too.",
    ),
    ("worker", WorkerOptions, ENGINE_FLAGS),
    ("frontend", FrontendOptions, ""),
    (
        "gateway",
        GatewayOptions,
        "[gateway.md](gateway.md) explains it. `serve` takes the group `gateway` too.",
    ),
    (
        "console",
        ConsoleOptions,
        "[console.md](console.md) explains it. `serve` starts one, and takes the group `console` too.",
    ),
    (
        "export",
        ExportOptions,
        "`export k8s` ([kubernetes.md](kubernetes.md)) or `export compose` ([containers.md](containers.md)).",
    ),
    (
        "check",
        CheckOptions,
        "Every option of a worker and every engine flag is accepted too; nothing is started.",
    ),
    ("check --live URL", LiveOptions, ""),
    ("size", SizeOptions, "The model may also be the first argument. [sizing.md](sizing.md) explains it."),
    (
        "status",
        StatusOptions,
        "The URL may also be the first argument. [operate.md](operate.md) explains what it shows.",
    ),
    ("processes", ControlOptions, PROCESSES),
    ("restart", ChangeOptions, "`restart NAME`. " + PROCESSES),
    ("drain", ChangeOptions, "`drain NAME`. " + PROCESSES),
    ("scale", ChangeOptions, "`scale GROUP N`. " + PROCESSES),
    ("lora", AdminOptions, "`lora load NAME URI`, `lora unload NAME`, `lora list`. " + ADMIN),
    ("sleep", SleepOptions, LIKE_LORA),
    ("wake", AdminOptions, LIKE_LORA),
    ("pause", PauseOptions, LIKE_LORA),
    ("resume", AdminOptions, LIKE_LORA),
    ("clear-kv", AdminOptions, LIKE_LORA),
    ("reset-caches", ResetOptions, LIKE_LORA),
    ("profile", ProfileOptions, "`profile start`, `profile stop`. " + LIKE_LORA),
    ("keys create", CreateKeyOptions, "`keys create NAME` prints the secret of a new key, once."),
    ("keys list", ListKeysOptions, "It never shows a secret."),
    ("keys revoke", DatabaseOptions, "`keys revoke KEY` ends a key for good, within a second."),
    ("keys rotate", RotateKeyOptions, "`keys rotate KEY` gives a key another secret."),
    ("keys tenant", TenantOptions, "`keys tenant NAME` shows the result."),
    ("usage", UsageOptions, "Days are in UTC."),
    ("chat", ChatOptions, "The URL may also be the first argument."),
    (
        "search",
        SearchOptions,
        "The question and the URL may also be the first arguments. [search.md](search.md) explains it.",
    ),
    ("bench load", LoadOptions, "The URL may also be the first argument. [bench.md](bench.md) explains it."),
    ("bench pooling", PoolingBenchOptions, "[bench.md](bench.md#pooling-models) explains it."),
    ("bench plane", PlaneOptions, ""),
    ("bench routing", RoutingOptions, ""),
    ("bench scale", ScaleOptions, "[bench.md](bench.md#many-workers-and-frontends-bench-scale) explains it."),
)
HEAD = """# Configuration

<!-- Written by `make docs` from the code; edit the declarations there, not this page. -->

Every option is a flag and an environment variable. A flag beats its variable, a variable beats the default.
A list takes several words as a flag, and words with spaces or commas between them as a variable. A yes-or-no
variable takes 1 or 0. A bad value is refused at the start with its name; the exit code is then 2.
"""


def main(argv: Sequence[str]) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: PYTHONPATH=scripts python -m generate.docs [--check]", file=sys.stderr)
        return 2
    if not ROOT.joinpath("pyproject.toml").is_file():
        print("error: the docs are written inside a checkout of the repository", file=sys.stderr)
        return 1
    wanted = {ROOT / name: text for name, text in pages().items()}
    if argv:
        return compare(wanted)
    for path, text in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


@functools.cache
def pages() -> dict[str, str]:
    return {"docs/configuration.md": page(), "docs/cli.md": reference.page()}


def compare(wanted: Mapping[Path, str]) -> int:
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"error: {path.relative_to(ROOT)} is not what the code says; run 'make docs'", file=sys.stderr)
    return 1 if stale else 0


def page() -> str:
    parts = [HEAD]
    parts += [section(command, cls, note) for command, cls, note in SECTIONS]
    codes = commands.EXIT_CODES.removeprefix("Exit codes: ")
    parts += [engine_defaults(), f"## Exit codes\n\n{codes}\n"]
    return "\n".join(parts)


def section(command: str, cls: type, note: str) -> str:
    """Return the section of one command: a table per group, in the order of the declarations."""
    name = command.split()[0]
    about = commands.COMMANDS[name][1] if name == command else (cls.__doc__ or "").splitlines()[0]
    lines = [
        f"## `dynamo-vllm {command}`",
        "",
        f"{about[:1].upper()}{about[1:].rstrip('.')}. {note}".strip(),
        "",
    ]
    known = {item.name for item in build.declared(AdminOptions)} if note.endswith(LIKE_LORA) else set()
    shown = [item for item in build.declared(cls) if not item.option.hidden and item.name not in known]
    groups = dict.fromkeys(item.option.group for item in shown)
    for group in sorted(groups, key=lambda group: group != name):  # its own one has no heading
        rows = [row(item) for item in shown if item.option.group == group]
        if group != name:
            lines += [f"### {name}: {group}", ""]
        lines += [*table(("flag", "variable", "default", "meaning"), rows), ""]
    return "\n".join(lines)


def row(item: build.Declared) -> tuple[str, ...]:
    meaning = item.option.help
    if item.option.choices:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in item.option.choices) + "."
    variables = ", ".join(f"`{name}`" for name in (item.option.env, *item.option.older_envs))
    return flags(item), variables, default(item), meaning


def flags(item: build.Declared) -> str:
    """Return every spelling of a flag, newest first, with its value."""
    if item.kind is bool:
        value = ""
    else:
        value = " " + (item.option.metavar or ("…" if item.option.choices else item.kind.__name__.upper()))
        value += " …" if item.many else ""
    spelled = [f"`{flag}{value}`" for flag in item.flags]
    if item.kind is bool and not item.flags[0].startswith("--no-"):
        spelled.append(f"`--no-{item.flags[0].removeprefix('--')}`")
    return ", ".join(spelled)


def default(item: build.Declared) -> str:
    if item.default in (None, ()):
        return "unset"
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    return f"`{' '.join(item.default) if isinstance(item.default, tuple) else item.default}`"


def engine_defaults() -> str:
    """Return what each rule sets on either device, by running the rules."""
    about = (
        "What we set over vLLM's own defaults, unless you set the argument yourself. "
        "`dynamo-vllm check --model …` shows which of them apply to your settings."
    )
    rows = [cells for rule in engine_rules.RULES if (cells := _rule(rule))]
    return "\n".join(
        ("## Engine defaults", "", about, "", *table(("argument", "on CPU", "on GPU", "reason"), rows), "")
    )


_GIVEN: dict[str, dict[str, Any]] = {
    " (only with --enable-sleep-mode)": {"enable_sleep_mode": True},
    " (only with --load-format gms)": {"load_format": "gms"},
}
"""Arguments of the user to which a rule may apply."""
_CASES: dict[str, dict[str, Any]] = {
    "": {},
    " (only with NIXL)": {"nixl": True},
    " (only with LMCache or KVBM)": {"has_plain_blocks": True},
    " (only with KVBM)": {"merged_kv_events": "tcp://127.0.0.1:<port>"},
    " (only on Arm without bfloat16)": {"has_bfloat16": False},
    " (only with LoRA)": {"lora": True},
    " (only for encode workers)": {"encodes_only": True},
    " (only behind encode workers)": {"takes_encoded": True},
    " (only for Whisper models)": {"source_positions": 1500},
    " (only with --otlp-endpoint)": {"traces_url": "<endpoint>"},
    " (with 16 GiB free, say)": {"free_bytes": 16 * 2**30},
    " (on 8 cores, say)": {"cores": 8},
    **dict.fromkeys(_GIVEN, {}),
}
"""The situations in which a rule may apply, the usual one first."""


def _rule(rule: engine_rules.Rule) -> list[str]:
    for only, more in _CASES.items():
        situations = (
            engine_rules.Situation(device, socket_folder="<temporary folder>", **more)
            for device in ("cpu", "cuda")
        )
        seen = [rule(_GIVEN.get(only, {}), situation) for situation in situations]
        if fired := next(filter(None, seen), None):
            reasons = dict.fromkeys(f.reason for f in seen if f is not None)
            return [f"`{fired.argument}`{only}", *map(_value, seen), "; ".join(reasons)]
    return []


def _value(fired: engine_rules.Fired | None) -> str:
    return "–" if fired is None else f"`{json.dumps(fired.value)}`"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
