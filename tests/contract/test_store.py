"""Tests the address on which the torch store of a diffusion stage listens."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta

import pytest

from dynamo_vllm.engine.patches import omni_store
from harness import listening
from harness.processes import free_port


def test_store_at_localhost_listens_for_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(
        rendezvous, "_create_c10d_store", rendezvous._create_c10d_store
    )  # put back afterwards
    omni_store.apply()
    port = free_port()
    store = rendezvous._create_c10d_store("localhost", port, 0, 1, timedelta(seconds=60))
    store.set("a", "b")
    assert store.get("a") == b"b"
    (found,) = [one for one in listening.listeners([os.getpid()]) if one.port == port]
    assert found.is_for_this_machine
