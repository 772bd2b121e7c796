"""A way to a server that can be cut after so many bytes of answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Cut:
    """Listens on `port` and passes on to another; `after` counts down over all answers, None never cuts."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.after: int | None = None
        self.requests: list[str] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for one, other, is_answer in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=(one, other, is_answer), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if not is_answer:
                    self.requests.append(data.partition(b" HTTP")[0].decode(errors="replace"))
                elif self.after is not None:
                    data = data[: self.after]
                    self.after -= len(data)
                other.sendall(data)
                if is_answer and self.after == 0:
                    break
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        # Closed alone, it goes on accepting, and under the number of a listener that comes after it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()


@contextlib.contextmanager
def cut(to: int) -> Iterator[Cut]:
    made = Cut(to)
    try:
        yield made
    finally:
        made.close()
