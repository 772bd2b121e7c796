"""`keys` and `usage` on a database of the test's own."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from pathlib import Path

import pytest

from dynamo_vllm.cli import main as cli
from dynamo_vllm.gateway.store.key_ring import KeyRing, NoKey
from dynamo_vllm.gateway.store.keys import Key
from dynamo_vllm.gateway.store.ledger import Ledger
from harness.gateway_store import opened, record

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "dynamo_vllm.config.build.environment", lambda: {"XDG_DATA_HOME": str(tmp_path), "HOME": "/nowhere"}
    )
    return tmp_path / "dynamo-vllm" / "gateway.db"


def found(data: Path, secret: str) -> Key | NoKey:
    database = opened(f"sqlite:///{data}")
    ring = KeyRing(database)
    asyncio.run(ring.refresh())
    database.close()
    return ring.find(secret)


def created(capsys: Captured, *words: str) -> str:
    assert cli.run(["keys", "create", *words]) == 0
    return capsys.readouterr().out.strip()


def test_created_key_works_and_its_secret_is_shown_once(data: Path, capsys: Captured) -> None:
    words = ["build", "--tenant", "acme", "--expires", "30d", "--model", "m", "--endpoint", "chat", "--admin"]
    assert cli.run(["keys", "create", *words, "--tokens-per-day", "1000", "--priority-class", "low"]) == 0
    shown = capsys.readouterr()
    secret = shown.out.strip()
    assert "it is not shown again" in shown.err and secret not in shown.err
    key = found(data, secret)
    assert isinstance(key, Key) and (key.name, key.tenant, key.limits.tokens_per_day) == (
        "build",
        "acme",
        1000,
    )
    assert key.expires is not None and abs(key.expires - time.time() - 30 * 86400) < 600
    assert cli.run(["keys", "list"]) == 0
    text = capsys.readouterr().out
    assert f"{key.prefix}  build  acme    low    1000 tokens/day  m chat +admin" in text
    assert "active" in text and secret not in text
    assert (stat.S_IMODE(data.stat().st_mode), stat.S_IMODE(data.parent.stat().st_mode)) == (0o600, 0o700)


def test_revoked_key_is_refused_and_listed_as_such(data: Path, capsys: Captured) -> None:
    secret = created(capsys, "build")
    assert cli.run(["keys", "revoke", secret[:11]]) == 0
    assert "is revoked" in capsys.readouterr().out
    assert found(data, secret) is NoKey.REVOKED
    assert cli.run(["keys", "rotate", "build"]) == 2
    assert "is revoked; create another one" in capsys.readouterr().err
    assert cli.run(["keys", "list", "--json"]) == 0
    assert [key["state"] for key in json.loads(capsys.readouterr().out)["keys"]] == ["revoked"]


@pytest.mark.parametrize(("words", "old_works"), [([], False), (["--grace", "1h"], True)])
def test_rotated_key_has_another_secret(
    data: Path, capsys: Captured, words: list[str], old_works: bool
) -> None:
    secret = created(capsys, "build")
    assert cli.run(["keys", "rotate", "build", "--json", *words]) == 0
    other = json.loads(capsys.readouterr().out)["secret"]
    assert isinstance(found(data, other), Key)
    assert isinstance(found(data, secret), Key) is old_works


def test_tenant_changes_only_in_what_is_given(capsys: Captured) -> None:
    for words in (["--concurrent", "3", "--tokens-per-day", "9"], ["--shares-cache"], ["--concurrent", "0"]):
        assert cli.run(["keys", "tenant", "acme", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split("  ")[-1] == "shared"
    assert cli.run(["keys", "list"]) == 0
    text = capsys.readouterr().out
    assert "no keys; 'dynamo-vllm keys create NAME' creates one" in text
    assert "acme    normal  9 tokens/day  shared" in text


def test_usage_is_printed_in_three_forms(data: Path, capsys: Captured) -> None:
    secret = created(capsys, "build", "--tenant", "acme")
    key = found(data, secret)
    assert isinstance(key, Key)
    database = opened(f"sqlite:///{data}")
    asyncio.run(Ledger(database).settle([record(key_id=key.id, at=time.time()), record("r2", at=86400.0)]))
    database.close()
    assert cli.run(["usage", "--by", "tenant", "key"]) == 0
    assert capsys.readouterr().out.split("\n")[1].split() == [
        *("acme", key.prefix, "build", "1", "10", "0", "5")
    ]
    assert (
        cli.run(["usage", "--by", "day", "model", "--since", "1970-01-01", "--until", "1970-01-03", "--csv"])
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "day,model,requests,prompt_tokens,cached_tokens,completion_tokens",
        "1970-01-02,m,1,10,0,5",
    ]
    assert cli.run(["usage", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"][0]["tenant"] == "acme"
    assert cli.run(["usage", "--since", "1971-01-01", "--until", "1971-01-02"]) == 0
    assert capsys.readouterr().out == "nothing was used since 1971-01-01\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["keys", "create", "a\nb"], "NAME must be up to 100 characters"),
        (["keys", "revoke", "none"], "there is no key 'none'; 'dynamo-vllm keys list' shows all"),
        (["keys", "tenant", "two words"], "NAME 'two words' is not a name of a tenant"),
        (["usage", "--by", "moon"], "is unknown; choose one of day, tenant, key, model"),
    ],
)
def test_refusal_names_the_fix(words: list[str], message: str, capsys: Captured) -> None:
    assert cli.run(words) == 2
    assert message in capsys.readouterr().err


def test_keys_alone_lists_its_commands(capsys: Captured) -> None:
    assert (cli.run(["keys"]), cli.run(["keys", "--help"])) == (2, 0)
    assert "rotate KEY" in capsys.readouterr().out
