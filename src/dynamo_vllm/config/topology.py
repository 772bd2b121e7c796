"""Describes what `serve` starts as plain data: a frontend and groups of workers, from a file and flags."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import build
from dynamo_vllm.config.options import FrontendOptions, GatewaySettings, WorkerOptions
from dynamo_vllm.config.options.worker import OLDER_ROLES
from dynamo_vllm.config.worker_plan import WorkerPlan
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.role_cards import RoleCard

Values = Mapping[str, Any]
"""Option values by field name, as text or as the file has them."""

TIERS = ("kv_offload_gb", "kv_offload_disk")
"""Options of workers that `serve` shares out over all of them, if they do not stand in a group."""
_SECTIONS = ("model", "frontend", "gateway", "workers", *TIERS)
_SHORT_NAMES = {"role": "disaggregation_mode"}
_GROUP_KEYS = ("name", "count", "env", "args")
"""Keys of a group that are no options of its workers."""
_GROUP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Identical workers."""

    count: int = 1
    options: Values = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    """Flags of vLLM, untouched."""
    name: str | None = None
    """For commands such as `scale`; None lets the plan choose one."""


@dataclass(frozen=True, slots=True)
class Topology:
    """One frontend and its workers, maybe behind a gateway; `model` is for every group without one."""

    model: str | None = None
    frontend: Values = field(default_factory=dict)
    workers: tuple[WorkerGroup, ...] = (WorkerGroup(),)
    gateway: Values | None = None
    """None: there is no gateway."""
    tiers: Values = field(default_factory=dict)
    """Memory and disk of all workers together for KV caches that leave their engines."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The values of the command line; they override the file."""

    frontend: Values = field(default_factory=dict)
    gateway: Values = field(default_factory=dict)
    worker: Values = field(default_factory=dict)
    args: tuple[str, ...] = ()
    workers: int | None = None
    prefill: int | None = None
    decode: int | None = None
    encode: int | None = None


# --- the file -------------------------------------------------------------------------------------------


def read(data: object, source: str) -> Topology:
    """Return the topology of a parsed YAML document; `source` names it in errors."""
    top = {key.replace("-", "_"): value for key, value in _mapping(data, source).items()}
    for key in top:
        if key not in _SECTIONS:
            raise ConfigError(f"{source}: {key!r} is unknown; {_hint(key, _SECTIONS)}")
    groups = top.get("workers", [{}])
    if not isinstance(groups, list) or not groups:
        raise ConfigError(f"{source}: workers must be a list of groups, such as '- count: 2'")
    made = tuple(_group(group, f"{source}: workers[{index}]") for index, group in enumerate(groups))
    _refuse_repeated_names(made, source)
    return Topology(
        model=_text(top["model"], f"{source}: model") if "model" in top else None,
        frontend=_options(FrontendOptions, top.get("frontend", {}), f"{source}: frontend"),
        gateway=_options(GatewaySettings, top["gateway"], f"{source}: gateway") if "gateway" in top else None,
        workers=made,
        tiers=_options(WorkerOptions, {name: top[name] for name in TIERS if name in top}, source),
    )


def _group(data: object, where: str) -> WorkerGroup:
    values = dict(_mapping(data, where))
    count = values.pop("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{where}: count {count!r} is not a number of workers; use 1 or more")
    name = values.pop("name", None)
    if name is not None and not (isinstance(name, str) and _GROUP_NAME.fullmatch(name)):
        raise ConfigError(
            f"{where}: name {name!r} is no name of a group; use a letter, then letters, digits, '.', '_' or "
            "'-', 63 at most"
        )
    env = _mapping(values.pop("env", {}), f"{where}: env")
    args = values.pop("args", [])
    if not isinstance(args, list):
        raise ConfigError(f"{where}: args must be a list of vLLM flags, such as [--max-model-len, 4096]")
    return WorkerGroup(
        count=count,
        options=_options(WorkerOptions, values, where, _GROUP_KEYS),
        env={name: _text(value, f"{where}: env: {name}") for name, value in env.items()},
        args=tuple(_word(word, f"{where}: args") for word in args),
        name=name,
    )


def _refuse_repeated_names(groups: Sequence[WorkerGroup], source: str) -> None:
    names = [group.name for group in groups if group.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{source}: two groups of workers have the name {name!r}; rename one")


def _word(value: object, where: str) -> str:
    """vLLM would report a flag with its value in one word as unknown."""
    word = _text(value, where)
    flag, *rest = word.partition("=")[0].split(maxsplit=1) or [""]
    if flag.startswith("-") and rest:
        raise ConfigError(f"{where}: {word!r} is one word; write [{flag}, {word.removeprefix(flag).strip()}]")
    return word


def _options(cls: type, data: object, where: str, more_keys: Iterable[str] = ()) -> dict[str, object]:
    """Values by field name; keys may be written like the flags, with dashes or underscores."""
    names = option_names(cls)
    found: dict[str, object] = {}
    for key, value in _mapping(data, where).items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            more = "; flags of vLLM go under args" if cls is WorkerOptions else ""
            raise ConfigError(f"{where}: {key!r} is unknown; {_hint(key, [*names, *more_keys])}{more}")
        if value is None:
            raise ConfigError(f"{where}: {key} has no value; give one or leave it out")
        found[name] = json.dumps(value) if isinstance(value, dict) else value
    return found


def option_names(cls: type) -> dict[str, str]:
    """Every way to write an option in the file → its field."""
    found = {}
    for item in build.declared(cls):
        if not item.option.hidden:
            found[item.name] = item.name
            found |= {flag.removeprefix("--").replace("-", "_"): item.name for flag in item.flags}
    return found | {short: name for short, name in _SHORT_NAMES.items() if name in found}


def _hint(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return (
        f"use one of {', '.join(names)}"
        if len(names) < 10
        else "'dynamo-vllm serve --help' lists the options"
    )


def _mapping(data: object, where: str) -> Mapping[str, object]:
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{where} must be a mapping of names to values")
    return data


def _text(value: object, where: str) -> str:
    """A word for a command line or an environment."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, dict):
        return json.dumps(value)
    raise ConfigError(f"{where}: {value!r} is neither text nor a number")


# --- the command line over the file ---------------------------------------------------------------------


def override(topology: Topology, line: CommandLine) -> Topology:
    """Return the file's topology with the values of the command line."""
    _refuse_role_flag(topology.workers, line)
    groups = _with_encoders(_with_counts(topology.workers, line), line)
    tiers = {name: value for name, value in line.worker.items() if name in TIERS}
    return Topology(
        model=topology.model,
        frontend={**topology.frontend, **line.frontend},
        gateway=topology.gateway if not line.gateway else {**(topology.gateway or {}), **line.gateway},
        workers=tuple(
            dataclasses.replace(
                group,
                options={**_without(group.options, tiers), **_for_group(group, line.worker)},
                args=(*group.args, *line.args),  # of a flag given twice vLLM takes the last
            )
            for group in groups
        ),
        tiers={**topology.tiers, **tiers},
    )


def _without(values: Values, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _refuse_role_flag(groups: tuple[WorkerGroup, ...], line: CommandLine) -> None:
    """One role for all would make the prefill workers of a file decode workers too."""
    named = role_flags(line.worker)
    if named and len({card_of(group) for group in groups}) > 1:
        raise ConfigError(
            f"{named[0]}: the file already sets the role of each worker; leave it out, or set 'role' there"
        )


def _with_counts(groups: tuple[WorkerGroup, ...], line: CommandLine) -> tuple[WorkerGroup, ...]:
    """Return the groups with the numbers of the command line."""
    if line.prefill is not None and line.decode is not None:
        asked = f"--prefill {line.prefill} --decode {line.decode}"
        if groups != (WorkerGroup(),):
            raise ConfigError(
                f"{asked}: the file already has groups of workers; set 'role' and 'count' there"
            )
        if named := role_flags(line.worker):
            raise ConfigError(f"{asked} already set the role of each worker; leave {named[0]} out")
        return (_group_of_role("prefill", line.prefill), _group_of_role("decode", line.decode))
    if line.workers is None:
        return groups
    if len(groups) > 1:
        raise ConfigError(f"--workers {line.workers}: the file has {len(groups)} groups; set count in each")
    return (dataclasses.replace(groups[0], count=line.workers),)


def _with_encoders(groups: tuple[WorkerGroup, ...], line: CommandLine) -> tuple[WorkerGroup, ...]:
    """Add encode workers to the groups; workers that see a prompt first call them."""
    if line.encode is None:
        return groups
    if any(card_of(group).encodes_media for group in groups):
        raise ConfigError(
            f"--encode {line.encode}: the file already has encode workers; set their count there"
        )
    if named := role_flags(line.worker):
        raise ConfigError(
            f"--encode {line.encode} already sets the role of each worker; leave {named[0]} out"
        )
    return (*(_calling_encoders(group) for group in groups), _group_of_role("encode", line.encode))


_ASK_ENCODERS = ("route_to_encoder", "ec_consumer_mode", "multimodal_worker")
_NOT_FOR_ENCODERS = (
    *_ASK_ENCODERS,
    "connector",
    "use_vllm_tokenizer",
    "enable_prompt_embeds",
    "lora_enabled",
    "lora_modules",
)


# A decode worker calls no encode worker, so it has nothing to fetch either.
_NOT_FOR_DECODE = (
    *_ASK_ENCODERS,
    "ec_connector_backend",
    "ec_storage_path",
    "ec_extra_config",
    "encoder_transfer",
)


def _for_group(group: WorkerGroup, given: Values) -> Values:
    """The command line applies to all workers; options that make no sense for a role are skipped there."""
    card = card_of(group)
    without = _NOT_FOR_ENCODERS if card.encodes_media else _NOT_FOR_DECODE if card.takes_kv else ()
    return _without(given, (*TIERS, *without))


def _calling_encoders(group: WorkerGroup) -> WorkerGroup:
    """A decode worker gets the KV cache of encoded media; it has its own vision encoder for what is lost."""
    if card_of(group).takes_kv or "ec_consumer_mode" in group.options:
        return group
    return dataclasses.replace(group, options={"route_to_encoder": True, **group.options})


def _group_of_role(role: str, count: int) -> WorkerGroup:
    return WorkerGroup(count=count, options={"disaggregation_mode": role})


def role_flags(given: Values) -> list[str]:
    """The flags among them that name a role, the newer name first."""
    names = ("disaggregation_mode", *OLDER_ROLES)
    return ["--" + name.replace("_", "-") for name in names if given.get(name)]


def card_of(group: WorkerGroup) -> RoleCard:
    return plan_of(group).options.card


def plan_of(group: WorkerGroup) -> WorkerPlan:
    """From the options and flags of the group; its variables are not looked at."""
    return WorkerPlan.of(build.from_values(WorkerOptions, group.options, {}), group.args)


def to_argv(cls: type, values: Values) -> list[str]:
    """Return the flags for `values`, except secrets; a value of the wrong type is rejected."""
    typed: object = build.from_values(cls, values, {})
    argv: list[str] = []
    for item in build.declared(cls):
        if item.name in values and not item.option.secret:
            argv += _flag(item, getattr(typed, item.name))
    return argv


def secrets(cls: type, values: Values) -> dict[str, str]:
    """Return the variables for the secrets among `values`: other users can see command lines."""
    hidden = [item for item in build.declared(cls) if item.option.secret and item.name in values]
    return {item.option.env: _in_variable(item, values[item.name]) for item in hidden}


def _in_variable(item: build.Declared, value: Any) -> str:
    return ",".join(map(str, value)) if item.many and not isinstance(value, str) else str(value)


def _flag(item: build.Declared, value: Any) -> Sequence[str]:
    name = item.flags[0]
    if item.kind is bool:
        return [name if value else name.replace("--", "--no-", 1)]
    if item.option.repeats:
        return [f"{name}={one}" for one in value]
    if item.many:
        return [name, *map(str, value)] if value else []
    return [f"{name}={value}"]  # in one word, for values that begin with a dash
