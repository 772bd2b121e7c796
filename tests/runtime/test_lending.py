"""Files lent over the real NIXL, between two agents of one process."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.engine.encoder_cache.folder import Folder, Unusable
from dynamo_vllm.serving.encoding.transfer import AT_ONCE, NixlAgent, TransferClient, TransferServer
from harness.fakes import FakeContext
from harness.waiting import until_async

NAMES = [f"{number:064x}" for number in range(AT_ONCE + 4)]


class Direct:
    """The runtime's client, as if the server were at its other end."""

    def __init__(self, server: TransferServer) -> None:
        self._server = server

    async def direct(self, request: Any, instance: int, annotated: bool, context: Any) -> AsyncIterator[Any]:
        return self._server._serve_file(request, context)


def offered(offers: list[asyncio.Task[Any]]) -> int:
    return sum(task.done() for task in offers)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = Folder(tmp_path_factory.mktemp("there"), 1 << 30)
    for number, name in enumerate(NAMES):
        folder.keep(name, bytes([number]) * 5000)
    return folder


async def test_file_comes_as_it_is_and_no_copy_holds_up_the_loop(
    there: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    make = ctypes.create_string_buffer

    def seen(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return make(*given)

    monkeypatch.setattr(ctypes, "create_string_buffer", seen)
    here = Folder(tmp_path, 1 << 30)
    client = TransferClient(Direct(TransferServer(there, NixlAgent())), here, NixlAgent())
    await asyncio.gather(*(client.fetch(1, name, FakeContext(name)) for name in NAMES))
    assert [here.contents(name, 1 << 20) for name in NAMES] == [there.contents(n, 1 << 20) for n in NAMES]
    assert len(threads) == 2 * len(NAMES) and threading.main_thread() not in threads
    with pytest.raises(Unusable, match="FileNotFoundError"):
        await client.fetch(1, "f" * 64, FakeContext())


async def test_so_many_files_are_lent_at_a_time_and_the_next_when_one_was_read(
    there: Folder, tmp_path: Path
) -> None:
    server = TransferServer(there, NixlAgent())
    contexts = [FakeContext(name) for name in NAMES]
    streams = [
        server._serve_file({"name": name}, context) for name, context in zip(NAMES, contexts, strict=True)
    ]
    offers = [asyncio.create_task(anext(stream, None)) for stream in streams]
    await until_async("their turn", lambda: offered(offers) >= AT_ONCE)
    assert offered(offers) == AT_ONCE
    gone = next(number for number, task in enumerate(offers) if not task.done())
    contexts[gone].stop()
    read = next(number for number, task in enumerate(offers) if task.done())
    here = TransferClient(Direct(server), Folder(tmp_path, 1 << 30), NixlAgent())
    told = await offers[read]
    assert told is not None and len(await here._read(told)) == 5000
    assert await anext(streams[read], None) is None, "it was read: its turn is over"
    assert await asyncio.wait_for(offers[gone], 30) is None, "nobody waits for this one any more"
    await until_async("the turn of two more", lambda: offered(offers) == AT_ONCE + 2)
    for task in offers:
        task.cancel()
    await asyncio.gather(*offers, return_exceptions=True)
    for stream in streams:
        assert isinstance(stream, AsyncGenerator)
        await stream.aclose()
