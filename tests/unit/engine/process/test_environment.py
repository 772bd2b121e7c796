"""Where vLLM's sockets go: the kernel limits the length of their paths."""

from __future__ import annotations

import tempfile

import pytest

from dynamo_vllm.engine.process.environment import socket_folder
from dynamo_vllm.errors import StartError


@pytest.mark.parametrize(
    ("temporary", "is_own"), [("/tmp", True), ("/" + "t" * 48, True), ("/" + "t" * 50, False)]
)
def test_own_folder_is_taken_where_its_path_is_short(
    temporary: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    own = f"{temporary}/dynamo-vllm-abcdefgh"
    assert socket_folder(own) == (own if is_own else temporary)


@pytest.mark.parametrize("temporary", ["/" + "t" * 70, "/" + "ä" * 35])
def test_long_path_is_refused_with_the_fix(temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    with pytest.raises(StartError, match=r"too long for sockets; set TMPDIR to one of at most 70 characters"):
        socket_folder(f"{temporary}/dynamo-vllm-abcdefgh")
