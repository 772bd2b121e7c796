"""What the commands send is what the workers' verbs take."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.cli.running import admin
from dynamo_vllm.serving.admin import client as admin_client

LINES = [
    *("lora load sql /x", "lora unload sql", "lora list", "sleep", "sleep --level 2 --drain-seconds 0"),
    *("wake", "pause", "pause --keep --drain-seconds 1", "resume", "clear-kv", "reset-caches"),
    *("reset-caches --kind prefix", "profile start", "profile start --prefix run-1", "profile stop"),
]


@pytest.mark.parametrize("line", LINES)
def test_body_of_a_command_is_what_its_verb_takes(line: str) -> None:
    name, rest = admin.named(line.split())
    assert name is not None
    command = admin.COMMANDS[name]
    options, words = admin.understand(name, command, rest, {})
    msgspec.convert(command.body(options, words), VERBS[command.verb].body)


def test_every_verb_has_a_command_and_a_time() -> None:
    others = {"status", "prove_tiers"}  # of `status` and `check --live`
    assert set(VERBS) == {command.verb for command in admin.COMMANDS.values()} | others
    assert set(VERBS) == set(admin_client.SECONDS)
