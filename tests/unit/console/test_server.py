"""Where the console listens."""

from __future__ import annotations

import contextlib

import pytest

from dynamo_vllm import ports
from dynamo_vllm.cli import main as cli
from dynamo_vllm.cli.start import console
from dynamo_vllm.console import server
from dynamo_vllm.errors import StartError


def test_named_port_that_is_taken_is_refused_and_another_one_avoided() -> None:
    with server.listen("127.0.0.1", 0, 0) as one:
        taken = ports.number(one)
        with pytest.raises(StartError, match=f"--console-port {taken} on 127.0.0.1 cannot be used"):
            server.listen("127.0.0.1", taken, 1)
        with server.listen("127.0.0.1", None, taken) as other:
            assert ports.number(other) != taken


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match=r"--console-host 192\.0\.2\.1 cannot be used"):
        server.listen("192.0.2.1", None, 0).close()


def test_console_listens_on_ipv6_too() -> None:
    with contextlib.suppress(StartError), server.listen("::1", None, 0) as one:
        assert one.getsockname()[0] == "::1"


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://h:8000", 8001), ("https://h", 0), ("http://h:80", 0), ("http://h:65535", 0)],
)
def test_port_is_the_one_after_the_deployments(url: str, port: int) -> None:
    assert console.port_after(url) == port


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--console-host", "0.0.0.0"], "give --admin-token"),
        (["--no-such"], "is not an option of the console"),
        (["--url", "ftp://x"], "is not the URL of a frontend"),
    ],
)
def test_bad_settings_end_with_code_2(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynamo_vllm.config.build.environment", dict)
    assert cli.run(["console", *words]) == 2
    assert said in capsys.readouterr().err
