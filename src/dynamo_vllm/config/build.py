"""Builds a command line from a dataclass of options: argparse, environment and docs share one declaration.

A flag overrides its environment variable, which overrides the default. Only this module reads the
environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import types
import typing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from dynamo_vllm.errors import ConfigError

if typing.TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")
_META = "option"
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option beside its type and default."""

    group: str
    help: str
    env: str
    flags: tuple[str, ...]
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    hidden: bool = False
    repeats: bool = False
    """One value per flag, which may be given several times."""
    bare_value: str | None = None
    """The value of a flag without an argument."""
    secret: bool = False
    """Its value is never shown."""
    older_envs: tuple[str, ...] = ()
    """Other names of the variable, read where `env` is not set."""


def opt(
    default: Any,
    group: str,
    help: str,
    *,
    env: str,
    flags: Sequence[str] = (),
    choices: Sequence[str] = (),
    metavar: str | None = None,
    hidden: bool = False,
    repeats: bool = False,
    bare_value: str | None = None,
    secret: bool = False,
    older_envs: Sequence[str] = (),
) -> Any:
    """A dataclass field that is also a flag and an environment variable."""
    declared = Option(
        group,
        help,
        env,
        tuple(flags),
        tuple(choices),
        metavar,
        hidden,
        repeats,
        bare_value,
        secret,
        tuple(older_envs),
    )
    return dataclasses.field(default=default, metadata={_META: declared})


@dataclass(frozen=True, slots=True)
class Declared:
    """One option of one class, with everything a parser or a page of docs needs."""

    name: str
    kind: type
    many: bool
    default: Any
    option: Option

    @property
    def flags(self) -> tuple[str, ...]:
        return self.option.flags or ("--" + self.name.replace("_", "-"),)

    def variable_in(self, env: Mapping[str, str]) -> str | None:
        """Return the variable that sets the option in `env`, by its newest name."""
        names = (self.option.env, *self.option.older_envs)
        return next((name for name in names if env.get(name, "") != ""), None)


def declared(cls: type) -> tuple[Declared, ...]:
    """Return the options of a dataclass in declaration order, or in the order of its GROUPS."""
    if cls not in _DECLARED:  # reading the types takes 10 ms
        _DECLARED[cls] = _read(cls)
    return _DECLARED[cls]


_DECLARED: dict[type, tuple[Declared, ...]] = {}


def _read(cls: type) -> tuple[Declared, ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        option = field.metadata.get(_META)
        if option is not None:
            kind, many = _kind(hints[field.name])
            found.append(Declared(field.name, kind, many, field.default, option))
    if order := getattr(cls, "GROUPS", ()):
        found.sort(key=lambda item: order.index(item.option.group))
    return tuple(found)


def _kind(hint: Any) -> tuple[type, bool]:
    """`int | None` → int; `tuple[str, ...]` → str, many."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError, so that all bad settings have the same exit code."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """The same text in every Python: before 3.13 each spelling of an option carried its value."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def parser(cls: type, prog: str, description: str, epilog: str = "", *, own_first: bool = False) -> Parser:
    """An argument parser with the options of `cls`, grouped as declared or the class' own groups first."""
    made = Parser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    add_options(made, cls, own_first=own_first)
    return made


def add_options(made: Parser, cls: type, *, own_first: bool = False) -> None:
    """Add the options of `cls` to a parser; those of its base classes were declared first."""
    items = declared(cls)
    names = list(dict.fromkeys(item.option.group for item in items))
    groups = {name: made.add_argument_group(name) for name in (reversed(names) if own_first else names)}
    for item in items:
        _add(groups[item.option.group], item)


def _add(group: argparse._ArgumentGroup, item: Declared) -> None:
    option = item.option
    text = argparse.SUPPRESS if option.hidden else _help_text(item).replace("%", "%%")
    if item.kind is bool:
        group.add_argument(
            *item.flags,
            dest=item.name,
            # A flag that is itself a no- has no second form.
            action="store_false" if item.flags[0].startswith("--no-") else argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        group.add_argument(
            *item.flags,
            dest=item.name,
            default=argparse.SUPPRESS,
            metavar=option.metavar
            or ("|".join(option.choices) if option.choices else item.kind.__name__.upper()),
            nargs="?" if option.bare_value is not None else "+" if item.many and not option.repeats else None,
            const=option.bare_value,
            action="append" if option.repeats else "store",
            help=text,
        )


def _help_text(item: Declared) -> str:
    default = "" if item.default in (None, (), False) else f" (default: {_show(item.default)})"
    return f"{item.option.help}{default} [{item.option.env}]"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse(
    cls: type[T], argv: Sequence[str], env: Mapping[str, str], prog: str, description: str, epilog: str = ""
) -> tuple[T, list[str]]:
    """Return the options of `cls` and the arguments it does not know, in order."""
    hashable: object = cls  # mypy does not consider a generic class hashable
    given, rest = _cached_parser(hashable, prog, description, epilog).parse_known_args(list(argv))
    return from_values(cls, vars(given), env), rest


@functools.cache
def _cached_parser(cls: type, prog: str, description: str, epilog: str) -> Parser:
    """`serve` reads the line of every worker it plans, some of them several times."""
    return parser(cls, prog, description, epilog)


def from_values(cls: type[T], given: Mapping[str, object], env: Mapping[str, str]) -> T:
    """Options from flag values (by field name), then the environment, then the defaults."""
    values: dict[str, object] = {}
    for item in declared(cls):
        if item.name in given:
            values[item.name] = _value(item, given[item.name], item.flags[0])
        elif (variable := item.variable_in(env)) is not None:
            values[item.name] = _value(item, env[variable], variable)
    return cls(**values)


def _value(item: Declared, raw: object, source: str) -> object:
    if item.many:
        words = raw.replace(",", " ").split() if isinstance(raw, str) else raw
        many = words if isinstance(words, list | tuple) else (words,)  # a file may have a number
        return tuple(_scalar(item, word, source) for word in many)
    if isinstance(raw, list | tuple):
        raise ConfigError(f"{source}={raw!r} is a list; give one value")
    return _scalar(item, raw, source)


_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def _scalar(item: Declared, raw: Any, source: str) -> Any:
    """Return one value of the declared type; an error names the source, the value and what is valid."""
    if item.kind is bool:
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() in _TRUE | _FALSE:
            return str(raw).lower() in _TRUE
        raise ConfigError(f"{source}={raw!r} is not a boolean; use 1 or 0")
    if item.kind in (int, float):
        try:
            if isinstance(raw, bool) or (item.kind is int and isinstance(raw, float) and raw % 1):
                raise ValueError
            return item.kind(raw)
        except (TypeError, ValueError):
            word = "a whole number" if item.kind is int else "a number"
            raise ConfigError(f"{source}={raw!r} is not {word}") from None
    if not item.option.choices:
        return str(raw)
    choice = next((c for c in item.option.choices if c.lower() == str(raw).lower()), None)
    if choice is None:
        raise ConfigError(f"{source}={raw!r} is unknown; choose one of {', '.join(item.option.choices)}")
    return choice


def without_secrets(options: Any) -> dict[str, Any]:
    """Return the values of options for logs and files, with secrets replaced."""
    secrets = {item.name for item in declared(type(options)) if item.option.secret}
    values: dict[str, Any] = dataclasses.asdict(options)
    return {name: HIDDEN if name in secrets and value else value for name, value in values.items()}


def environment() -> Mapping[str, str]:
    """The process environment, read once per process by the command line."""
    return dict(os.environ)
