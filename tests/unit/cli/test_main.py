"""The command: exit codes, one line for a refusal."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from dynamo_vllm import __version__
from dynamo_vllm.cli import main as cli
from dynamo_vllm.cli import versions
from dynamo_vllm.engine.vllm.compat import versions as compat
from dynamo_vllm.errors import ConfigError, StartError


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_vllm.config.build.environment", dict)


def test_usage_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in cli.COMMANDS)
    assert "Exit codes: 0 done" in text
    assert cli.run(["srve"]) == 2
    refused = capsys.readouterr().err
    assert "'srve' is not a command" in refused and "usage: dynamo-vllm" in refused


def test_version_lists_the_installed_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines == versions.found()
    assert lines["dynamo-vllm"] == __version__
    assert set(lines) <= {"dynamo-vllm", "python", "machine", *versions.PARTS}


@pytest.mark.parametrize(
    ("raised", "code"),
    [(ConfigError("bad"), 2), (StartError("bad"), 1), (KeyboardInterrupt(), 130), (SystemExit(143), 143)],
)
def test_way_out_of_a_command_is_its_exit_code(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr("dynamo_vllm.cli.check.main", fail)
    assert cli.run(["check"]) == code
    assert capsys.readouterr().err == ("error: bad\n" if str(raised) == "bad" else "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("worker", "--model is missing"),
        ("worker --model m --system-port x", "--system-port='x' is not a whole number"),
        ("frontend --router best", "--router='best' is unknown"),
        ("frontend --max-model-len 5", "--max-model-len is not an option of the frontend"),
        ("status --colour", "--colour is not an option of status"),
        ("status ftp://host", "'ftp://host' is not the URL of a frontend"),
        ("chat --colour -m hello", "--colour is not an option of chat"),
        ("chat -m=", "the message is empty"),
        ("bench quick", "bench: 'quick' is unknown; choose one of load"),
        ("bench load --colour", "unrecognized arguments: --colour"),
        ("bench load --requests 0", "--requests 0 must be 1 or more"),
        ("bench load ftp://host", "'ftp://host' is not the URL of a server; write http://host:port"),
        ("bench load --prompts trace --trace /no/file", "--trace /no/file cannot be read"),
        ("bench load --watch x=999999999", "--watch x=999999999: there is no such process"),
        ("check --live http://127.0.0.1:1 --block-size 8", "--block-size cannot be combined with --live"),
        ("keys make", "keys: 'make' is unknown; choose one of create"),
        ("keys create", "NAME is missing: dynamo-vllm keys create NAME"),
        ("keys revoke a b", "'b' is one argument too many"),
        ("keys list --nope", "--nope is not an option of keys list"),
        ("usage --nope", "--nope is not an option of usage"),
        ("size", "no model is named; write dynamo-vllm size MODEL"),
        ("size nowhere", "nowhere: there is no such file or folder"),
        ("size org/unfetched", "org/unfetched is neither a folder nor in the hub's cache"),
        ("lora laod", "lora: 'laod' is unknown; choose one of load, unload, list"),
        ("lora load sql", "URI is missing: dynamo-vllm lora load NAME URI"),
        ("lora unload", "NAME is missing"),
        ("sleep deep", "'deep' is one argument too many: dynamo-vllm sleep"),
        ("sleep --deep", "--deep is not an option of sleep; see 'dynamo-vllm sleep --help'"),
        ("sleep --level 3", "--level 3 is unknown"),
        ("wake --all --worker 1", "--all and --worker 1 cannot be combined"),
        ("wake --run-dir /no/such/folder", "--run-dir /no/such/folder: no serve runs there"),
        ("restart", "NAME is missing: dynamo-vllm restart NAME"),
        ("restart a b", "'b' is one argument too many: dynamo-vllm restart NAME"),
        ("restart a --force", "--force is not an option of restart"),
        ("restart a --drain-seconds -1", "--drain-seconds -1.0 must be 0 or more, and finite"),
        ("drain", "NAME is missing: dynamo-vllm drain NAME"),
        ("scale worker", "N is missing: dynamo-vllm scale GROUP N"),
        ("scale worker many", "N 'many' is not a number of workers"),
        ("processes --drain-seconds 1", "--drain-seconds is not an option of processes"),
    ],
)
def test_bad_setting_ends_with_code_2_and_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


# --- check, without a running system ----------------------------------------------------------------------


def checked(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = cli.run(["check", "--json", "--no-engine", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_check_tells_what_is_set_and_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "dynamo_vllm.config.build.environment",
        lambda: {"DYN_NAMESPACE": "mine", "DYN_VLLM_DRAIN_SECONDS": "5"},
    )
    code, found = checked(capsys, "--model", "m", "--served-model-name", "a", "b", "--block-size", "16")
    assert code == 0
    assert found["settings"] == [
        {"name": "--namespace", "value": "mine", "source": "DYN_NAMESPACE"},
        {"name": "--model", "value": "m", "source": "flag"},
        {"name": "--served-model-name", "value": ["a", "b"], "source": "flag"},
        {"name": "--drain-seconds", "value": 5.0, "source": "DYN_VLLM_DRAIN_SECONDS"},
    ]
    assert found["engine_flags"] == ["--block-size", "16"]
    assert found["facts"]["address"] == "mine.backend.generate"


def test_check_shows_no_secret_and_lists_every_problem_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = checked(capsys, "--model", "m", "--admin-token", "geheim")
    assert "geheim" not in json.dumps(found)
    assert {"name": "--admin-token", "value": "(hidden)", "source": "flag"} in found["settings"]
    code, found = checked(capsys, "--migration-limit", "-1", "--health-seconds", "0", "--max-pictures", "0")
    assert (code, len(found["problems"])) == (2, 3)


def test_check_without_a_model_still_shows_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check"]) == 0
    text = capsys.readouterr().out
    assert "no problem found" in text
    assert f"dynamo-vllm        {__version__}" in text


def test_check_says_what_was_not_proven_with_this_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "unproven", lambda: ("LoRA", "sleep"))
    code, found = checked(capsys)
    assert (code, found["not_proven"]) == (0, ["LoRA", "sleep"]), "no problem"
    assert cli.run(["check", "--no-engine"]) == 0
    assert "not proven with this vLLM\n  LoRA, sleep\n" in capsys.readouterr().out
    monkeypatch.setattr(compat, "unproven", lambda: ())
    assert cli.run(["check", "--no-engine"]) == 0
    assert "not proven" not in capsys.readouterr().out


def test_check_finds_a_taken_port_and_counts_one_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, found = checked(capsys, "--bind-host", "127.0.0.1", "--kv-event-port", str(port))
    assert found["ports"] == [{"use": "KV events of rank 0", "port": port, "free": False}]
    assert code == 2
    _, found = checked(capsys, "--kv-event-port", "20080", "--data-parallel-size", "3")
    assert [port["port"] for port in found["ports"]] == [20080, 20081, 20082]
