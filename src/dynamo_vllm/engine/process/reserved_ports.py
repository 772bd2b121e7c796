"""Reserves TCP ports for vLLM from the moment they are chosen until it listens on them.

A port that was merely found free may be a sibling's or an outgoing connection's before vLLM gets there, which
is after the model was loaded. A socket that is bound and does not listen keeps it: Linux gives such a port to
nobody who asks for a free one, while ZMQ, which sets SO_REUSEADDR, may still listen on it.
"""

from __future__ import annotations

import contextlib
import socket

from dynamo_vllm.errors import StartError

_TRIES = 50
_kept: list[socket.socket] = []
"""For the life of the process."""


def keep(count: int) -> int:
    """The first of so many free ports in a row, from now on ours."""
    for _ in range(_TRIES):
        with contextlib.ExitStack() as held:
            first = held.enter_context(_bound(0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                others = [held.enter_context(_bound(port + offset)) for offset in range(1, count)]
                held.pop_all()
                _kept.extend([first, *others])
                return port
    raise StartError(f"found no {count} free ports in a row; set --kv-event-port and --side-channel-port")


def _bound(port: int) -> socket.socket:
    """Only a port that nobody has bound; the option comes afterwards, it would let us share one."""
    made = socket.socket()
    try:
        made.bind(("", port))
    except (OSError, OverflowError):
        made.close()
        raise
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def refuse_taken(option: str, host: str, port: int) -> None:
    """vLLM 0.30 waits for ever for a side channel that cannot listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise StartError(
                f"{option} {port} on {host or 'any address'} cannot be used: {exc.strerror}; "
                "name another or leave it out"
            ) from None
