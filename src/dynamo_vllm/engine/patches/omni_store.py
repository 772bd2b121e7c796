"""Binds the torch store of a diffusion stage to the loopback address.

What is wrong in torch 2.13, as vLLM-Omni 0.30 uses it: a TCPStore is created with the host localhost, but its
server listens on every address.

What we do: give the server a socket that listens on loopback.

It can go when torch binds a store to the host that it is given.
"""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import in_omni, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

_CREATE = "_create_c10d_store"
_LOOPBACK = "127.0.0.1"


def _rendezvous() -> Any:
    return importlib.import_module("torch.distributed.rendezvous")  # a function has this name too


def apply() -> None:
    wrap(_rendezvous(), _CREATE, _on_loopback)


def _on_loopback(create: Callable[..., Store]) -> Callable[..., Store]:
    from torch.distributed import TCPStore

    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: object, use_libuv: bool = True
    ) -> Store:
        if rank != 0 or hostname not in ("localhost", _LOOPBACK):
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        with socket.create_server((_LOOPBACK, port)) as listener:
            return TCPStore(
                host_name=_LOOPBACK,
                port=listener.getsockname()[1],
                world_size=world_size,
                is_master=True,
                timeout=timeout,
                multi_tenant=True,
                use_libuv=use_libuv,
                master_listen_fd=listener.detach(),
            )

    return create_store


def still_needed() -> bool:
    text = source(getattr(_rendezvous(), _CREATE))
    return "TCPStore(" in text and "master_listen_fd" not in text


PATCHES = (
    in_omni(
        name="omni-store",
        targets=("torch.distributed.rendezvous._create_c10d_store",),
        defect="the torch store of a diffusion stage listens on every address",
        apply=apply,
        still_needed=still_needed,
    ),
)
