"""From declarations to values: flag before variable before default; refusals name their source."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from dynamo_vllm.cli.check import CheckOptions, LiveOptions
from dynamo_vllm.cli.running.chat import ChatOptions
from dynamo_vllm.cli.running.status import StatusOptions
from dynamo_vllm.config import build, runtime_env
from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options import (
    AdminOptions,
    FrontendOptions,
    PauseOptions,
    ProfileOptions,
    ResetOptions,
    ServeOptions,
    SleepOptions,
    WorkerOptions,
)
from dynamo_vllm.config.options.gateway.keys import (
    CreateKeyOptions,
    ListKeysOptions,
    RotateKeyOptions,
    TenantOptions,
)
from dynamo_vllm.config.options.gateway.usage import UsageOptions
from dynamo_vllm.config.options.search import SearchOptions
from dynamo_vllm.errors import ConfigError

EVERY_CLASS = (
    WorkerOptions,
    FrontendOptions,
    ServeOptions,
    CheckOptions,
    LiveOptions,
    StatusOptions,
    ChatOptions,
    SearchOptions,
    AdminOptions,
    SleepOptions,
    PauseOptions,
    ResetOptions,
    ProfileOptions,
    CreateKeyOptions,
    ListKeysOptions,
    RotateKeyOptions,
    TenantOptions,
    UsageOptions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    name: str = opt("anna", "group", "Who.", env="X_NAME")
    count: int | None = opt(None, "group", "How many.", env="X_COUNT", flags=("--count", "--number"))
    share: float = opt(0.5, "group", "How much.", env="X_SHARE")
    loud: bool = opt(False, "group", "Whether loud.", env="X_LOUD")
    colour: bool = opt(True, "group", "Leave colours out.", env="X_COLOUR", flags=("--no-colour",))
    words: tuple[str, ...] = opt(("a",), "group", "Which.", env="X_WORDS")
    kind: str = opt("red", "group", "Of which kind.", env="X_KIND", choices=("red", "blue"))
    secret: int = opt(1, "group", "For tools.", env="X_SECRET", hidden=True)
    every: float | None = opt(
        None, "group", "How often.", env="X_EVERY", bare_value="2", older_envs=("OLD_EVERY",)
    )
    token: str | None = opt(None, "other", "Not to be seen.", env="X_TOKEN", secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered(Small):
    GROUPS: ClassVar[tuple[str, ...]] = ("last", "other", "group")
    last: int = opt(0, "last", "Written last.", env="X_LAST")
    more: int = opt(0, "other", "One more of a group that began above.", env="X_MORE")


def parsed(*argv: str, **env: str) -> Small:
    options, rest = build.parse(Small, argv, env, "prog", "about")
    assert rest == []
    return options


def test_flag_beats_variable_beats_default() -> None:
    assert parsed() == parsed(X_NAME="", X_COUNT="") == Small(), "an empty variable counts as unset"
    assert parsed(X_NAME="berta").name == "berta"
    assert parsed("--name", "carla", X_NAME="berta").name == "carla"
    assert parsed("--number", "3") == parsed("--count", "3") == parsed(X_COUNT="3"), "older name of the flag"


def test_older_variable_counts_where_the_newer_is_not_set() -> None:
    assert parsed(OLD_EVERY="3").every == parsed(OLD_EVERY="3", X_EVERY="").every == 3
    assert parsed(OLD_EVERY="3", X_EVERY="4").every == 4
    assert parsed("--every", "5", OLD_EVERY="3").every == 5
    with pytest.raises(ConfigError, match="OLD_EVERY='often' is not a number"):
        parsed(OLD_EVERY="often")


def test_values_get_their_declared_type() -> None:
    options = parsed("--count", "3", "--share", "1")
    assert (options.count, options.share) == (3, 1.0)
    assert isinstance(options.share, float)
    for word, value in {"1": True, "TRUE": True, "on": True, "0": False, "no": False}.items():
        assert parsed(X_LOUD=word).loud is value
    assert parsed("--loud").loud is True
    assert parsed("--no-loud", X_LOUD="1").loud is False
    assert parsed("--words", "x", "y").words == ("x", "y")
    assert parsed(X_WORDS="x,y z").words == ("x", "y", "z")
    assert parsed("--kind", "RED").kind == parsed(X_KIND="Red").kind == "red"
    assert parsed("--every", "--loud") == Small(every=2.0, loud=True)
    assert parsed("--every", "0.5").every == 0.5


def test_flag_that_begins_with_no_switches_off_and_has_one_form() -> None:
    assert parsed("--no-colour").colour is False
    assert parsed(X_COLOUR="0").colour is False
    assert "--no-no-colour" not in build.parser(Small, "prog", "about").format_help()


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--count", "many"], {}, "--count='many' is not a whole number"),
        (["--number", "1.5"], {}, "--count='1.5' is not a whole number"),
        ([], {"X_COUNT": "many"}, "X_COUNT='many' is not a whole number"),
        (["--share", "half"], {}, "--share='half' is not a number"),
        ([], {"X_LOUD": "perhaps"}, "X_LOUD='perhaps' is not a boolean; use 1 or 0"),
        (["--kind", "green"], {}, "--kind='green' is unknown; choose one of red, blue"),
        ([], {"X_KIND": "green"}, "X_KIND='green' is unknown; choose one of red, blue"),
        (["--count"], {}, "argument --count/--number: expected one argument"),
        (["--loud=1"], {}, "ignored explicit argument '1'"),
    ],
)
def test_bad_value_is_refused_with_its_source_and_what_would_do(
    argv: list[str], env: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        build.parse(Small, argv, env, "prog", "about")
    assert message in str(refusal.value)


def test_unknown_flags_come_back_in_their_order() -> None:
    argv = ["--alpha", "1", "--name", "carla", "-O3", "--beta=2", "--gamma", "x", "y"]
    options, rest = build.parse(Small, argv, {}, "prog", "about")
    assert options.name == "carla"
    assert rest == ["--alpha", "1", "-O3", "--beta=2", "--gamma", "x", "y"]
    options, rest = build.parse(Small, ["--nam", "carla"], {}, "prog", "about")
    assert (options.name, rest) == ("anna", ["--nam", "carla"]), "the engine has flags that begin like ours"


def test_help_names_default_and_variable_and_leaves_hidden_options_out() -> None:
    text = build.parser(Small, "prog", "about").format_help()
    assert "Who. (default: anna) [X_NAME]" in text
    assert "--secret" not in text


def test_secret_is_shown_nowhere() -> None:
    assert build.without_secrets(parsed("--token", "geheim"))["token"] == "(hidden)"
    assert build.without_secrets(parsed())["token"] is None


def test_groups_of_the_class_itself_may_come_first() -> None:
    groups = list(build.parser(Small, "p", "d", own_first=True).format_help().splitlines())
    assert groups.index("other:") < groups.index("group:")


def test_groups_come_in_the_order_their_class_names_them() -> None:
    found = build.declared(Ordered)
    assert list(dict.fromkeys(item.option.group for item in found)) == ["last", "other", "group"]
    assert [item.name for item in found if item.option.group == "other"][-1] == "more"
    help_text = build.parser(Ordered, "p", "d").format_help()
    assert help_text.index("\nlast:") < help_text.index("\nother:") < help_text.index("\ngroup:")


def test_caller_takes_no_port_of_the_worker_it_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"DYN_SYSTEM_PORT": "9090", "DYN_HEALTH_CHECK_ENABLED": "true"}
    monkeypatch.setattr(os, "environ", dict(environment))
    options = AdminOptions(namespace="n", file_kv="/kv", bind_host="127.0.0.1")
    runtime_env.export_caller(options, environment)
    assert os.environ["DYN_SYSTEM_PORT"] == "-1"
    assert os.environ["DYN_HEALTH_CHECK_ENABLED"] == "false"
    assert (os.environ["DYN_NAMESPACE"], os.environ["DYN_FILE_KV"]) == ("n", "/kv")
    assert os.environ["DYN_TCP_RESPONSE_STREAM_HOST"] == "127.0.0.1"


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_every_field_of_our_options_is_declared_once_and_has_a_default(cls: type[object]) -> None:
    declared = build.declared(cls)
    assert sorted(item.name for item in declared) == sorted(field.name for field in fields(cls))  # type: ignore[arg-type]
    spelled = [flag for item in declared for flag in item.flags]
    variables = [name for item in declared for name in (item.option.env, *item.option.older_envs)]
    assert len(set(spelled)) == len(spelled)
    assert len(set(variables)) == len(variables)
    assert all(item.option.help and item.option.group for item in declared)
    assert build.parse(cls, [], {}, "prog", "about") == (cls(), [])


@pytest.mark.parametrize(
    ("cores", "worker", "frontend"), [(1, 1, 2), (2, 1, 2), (16, 2, 4), (32, 4, 8), (256, 4, 8)]
)
def test_threads_grow_slowly_with_the_cores(cores: int, worker: int, frontend: int) -> None:
    assert (runtime_env.worker_threads(cores), runtime_env.frontend_threads(cores)) == (worker, frontend)


@pytest.mark.parametrize(
    ("options", "environment", "name", "expected"),
    [
        ({}, {}, "DYN_RUNTIME_NUM_WORKER_THREADS", "3"),
        ({"runtime_threads": 5}, {}, "DYN_RUNTIME_NUM_WORKER_THREADS", "5"),
        ({}, {"DYN_RUNTIME_NUM_WORKER_THREADS": "7"}, "DYN_RUNTIME_NUM_WORKER_THREADS", "7"),
        # Errors of the runtime read no symbols.
        ({}, {"RUST_BACKTRACE": "1"}, "RUST_LIB_BACKTRACE", "0"),
        ({}, {"RUST_BACKTRACE": "1", "RUST_LIB_BACKTRACE": "1"}, "RUST_LIB_BACKTRACE", "1"),
        # Requests outlast ten seconds without NATS.
        ({"request_plane": "nats"}, {}, "DYN_NATS_REQUEST_TIMEOUT_SECS", "20"),
        (
            {"request_plane": "nats"},
            {"DYN_NATS_REQUEST_TIMEOUT_SECS": "7"},
            "DYN_NATS_REQUEST_TIMEOUT_SECS",
            "7",
        ),
        ({"request_plane": "tcp"}, {}, "DYN_NATS_REQUEST_TIMEOUT_SECS", None),
        # NIXL stays on a machine that the runtime does not leave.
        ({"bind_host": "127.0.0.1"}, {}, "UCX_NET_DEVICES", "lo"),
        ({"bind_host": "10.0.0.5"}, {}, "UCX_NET_DEVICES", None),
        ({"bind_host": "127.0.0.1"}, {"UCX_NET_DEVICES": "all"}, "UCX_NET_DEVICES", "all"),
    ],
)
def test_runtime_is_told_our_defaults_unless_the_user_says_more(
    options: dict[str, Any],
    environment: dict[str, str],
    name: str,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    runtime_env.export(FrontendOptions(**options), environment, 3, "frontend")
    assert os.environ.get(name) == expected
