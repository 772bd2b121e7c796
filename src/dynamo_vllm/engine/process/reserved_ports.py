"""Reserves TCP ports for vLLM from the moment they are chosen until vLLM listens on them.

vLLM listens only after it has loaded the model. Until then another worker or an outgoing connection could
take a port that was found free. A socket that is bound but does not listen reserves the port: Linux does not
give it to programs that ask for any free port, but ZMQ can still listen on it because it sets SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import socket

from dynamo_vllm.errors import StartError

_TRIES = 50
_kept: list[socket.socket] = []
"""Stays open for the life of the process."""


def reserve(count: int) -> int:
    """Reserves this many consecutive free ports and returns the first."""
    for _ in range(_TRIES):
        with contextlib.ExitStack() as held:
            first = held.enter_context(_bound(0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                others = [held.enter_context(_bound(port + offset)) for offset in range(1, count)]
                held.pop_all()
                _kept.extend([first, *others])
                return port
    raise StartError(
        f"could not find {count} consecutive free ports; set --kv-event-port and --side-channel-port"
    )


def _bound(port: int) -> socket.socket:
    """Returns a socket bound to a port that no other socket is bound to.

    SO_REUSEADDR is set only after the bind, because before it would allow sharing a port.
    """
    made = socket.socket()
    try:
        made.bind(("", port))
    except (OSError, OverflowError):
        made.close()
        raise
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def refuse_taken(option: str, host: str, port: int) -> None:
    """Raises StartError if a port is in use; vLLM 0.30 waits forever if its side channel cannot listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise StartError(
                f"{option} {port} on {host or 'any address'} cannot be used: {exc.strerror}; "
                "choose another or leave it out"
            ) from None
