"""The commands that ask workers, up to the runtime: words, bodies, targets, and what is printed."""

from __future__ import annotations

import asyncio
import io
import json
import os
from typing import Any

import msgspec
import pytest

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.cli import main as cli
from dynamo_vllm.cli.running import adapter_progress, admin
from dynamo_vllm.config.options import AdminOptions
from dynamo_vllm.observe.units import size
from dynamo_vllm.serving.admin import client as admin_client

ONE, TWO = 0xA1B2C3D4E5F60718, 0x1122334455667788
NAMES = {ONE: "a1b2c3", TWO: "112233"}


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr("dynamo_vllm.config.build.environment", lambda: {"HOME": str(tmp_path)})


# --- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lora load sql hf://a/b", {"lora_name": "sql", "source": {"uri": "hf://a/b"}}),
        ("lora load --json sql /x --all", {"lora_name": "sql", "source": {"uri": "/x"}}),
        ("lora load a x/y", {"lora_name": "a", "source": {"uri": os.path.abspath("x/y")}}),
        ("lora unload sql", {"lora_name": "sql"}),
        ("lora list", {}),
        ("sleep", {"level": 1}),
        ("sleep --level 2 --drain-seconds 5", {"level": 2, "drain_seconds": 5.0}),
        ("wake", {}),
        ("pause", {"mode": "wait"}),
        ("pause --keep", {"mode": "keep"}),
        ("pause --drain-seconds 0", {"mode": "wait", "drain_seconds": 0.0}),
        ("resume", {}),
        ("clear-kv", {}),
        ("reset-caches", {"kinds": ["prefix", "multimodal", "encoder"]}),
        ("reset-caches --kind encoder --kind encoder", {"kinds": ["encoder"]}),
        ("profile start --prefix p", {"prefix": "p"}),
        ("profile start", {}),
        ("profile stop", {}),
    ],
)
def test_words_become_the_body_that_their_verb_takes(line: str, expected: dict[str, Any]) -> None:
    name, rest = admin.named(line.split())
    assert name is not None
    command = admin.COMMANDS[name]
    options, words = admin.understand(name, command, rest, {})
    body = command.body(options, words)
    assert body == expected
    msgspec.convert(body, VERBS[command.verb].body)


def test_nobody_in_discovery_ends_with_code_1_and_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["wake", "--file-kv", "/no/such/folder", "--namespace", "mine"]) == 1
    assert capsys.readouterr().err == (
        "error: no worker of namespace mine is in discovery at /no/such/folder; start one, or "
        "give --file-kv or --run-dir\n"
    )


@pytest.mark.parametrize("command", admin.COMMANDS)
def test_help_says_whom_it_asks(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert ("applies to every worker" in text) is command.startswith("lora")
    assert ("give --all or --worker" in text) is not command.startswith("lora")


def test_group_alone_lists_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["lora"]) == 2
    assert "  load NAME URI" in capsys.readouterr().out
    assert cli.run(["profile", "--help"]) == 0


def test_every_verb_has_a_command_and_a_time() -> None:
    others = {"status", "prove_tiers"}  # of `status` and `check --live`
    assert set(VERBS) == {command.verb for command in admin.COMMANDS.values()} | others
    assert set(VERBS) == set(admin_client.SECONDS)


# --- what is printed --------------------------------------------------------------------------------------


def test_refusals_go_to_stderr_each_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    replies = {
        ONE: {"status": "success", "already": True},
        TWO: {"status": "error", "error": "wrong_state", "message": "it is draining", "code": 409},
    }
    admin.report("wake", admin.COMMANDS["wake"], AdminOptions(), replies, NAMES)
    said = capsys.readouterr()
    assert said.out == "a1b2c3: already awake\n"
    assert said.err == "112233: refused (409 wrong_state): it is draining\n"


def test_json_has_every_reply(capsys: pytest.CaptureFixture[str]) -> None:
    admin.report("wake", admin.COMMANDS["wake"], AdminOptions(json=True), {ONE: {"status": "success"}}, NAMES)
    assert json.loads(capsys.readouterr().out) == {
        "verb": "wake_up",
        "workers": [{"worker": "a1b2c3", "instance": ONE, "status": "success"}],
    }


def test_adapters_of_all_workers_stand_in_one_table() -> None:
    sql = {"name": "sql", "state": "loaded", "uri": "/a", "rank": 8, "leases": 2}
    bad = {"name": "bad", "state": "failed", "uri": "/b", "error": "no such folder"}
    replies = {
        ONE: {"status": "success", "loras": [sql, bad], "count": 1, "capacity": 4},
        TWO: {"status": "success", "loras": [], "count": 0, "capacity": 4},
    }
    assert admin.adapters(replies, NAMES).splitlines() == [
        "WORKER  ADAPTER  STATE                   RANK  IN USE  SOURCE",
        "a1b2c3  sql      loaded                  8     2       /a",
        "a1b2c3  bad      failed: no such folder  -     0       /b",
        "a1b2c3 has 1 of 4; 112233 has 0 of 4",
    ]


def test_sizes_for_a_person() -> None:
    texts = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 45.6e6: "45.6 MB", 2e15: "2000.0 TB", None: "?"}
    assert {count: size(count) for count in texts} == texts


# --- the line while an adapter is loaded ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"state": "fetching", "done_bytes": 5e6, "total_bytes": 2e7}, "fetching 5.0 MB of 20.0 MB (25 %)"),
        ({"state": "fetching", "done_bytes": 5e6, "total_bytes": None}, "fetching 5.0 MB"),
        ({"state": "fetching", "done_bytes": 0, "total_bytes": None}, "fetching"),
        ({"state": "loaded", "done_bytes": 5, "total_bytes": 5}, "loaded"),
        ({"state": "failed", "done_bytes": 5, "error": "no such folder"}, "failed: no such folder"),
    ],
)
def test_how_far_an_adapter_is(entry: dict[str, Any], text: str) -> None:
    assert adapter_progress.progress(entry) == text


def test_line_names_every_worker_and_fits_the_terminal() -> None:
    states = {"a1b2c3": "verifying", "112233": "waiting"}
    assert adapter_progress.line("sql", states, 80) == "sql: a1b2c3 verifying, 112233 waiting"
    assert adapter_progress.line("sql", states, 10) == "sql: a1b2c"
    assert adapter_progress.state_of({"loras": [{"name": "other", "state": "ready"}]}, "sql") == "waiting"


async def test_no_line_where_nobody_looks() -> None:
    asked: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stream = io.StringIO()
    await adapter_progress.show(None, "sql", {ONE: asked}, NAMES, stream)  # type: ignore[arg-type]
    assert stream.getvalue() == ""
