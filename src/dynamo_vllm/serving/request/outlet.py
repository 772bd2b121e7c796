"""Encodes and sends the outputs of one job; runs for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import Draining
from dynamo_vllm.serving.request.cancel import LEAVING
from dynamo_vllm.serving.request.egress import CHUNKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.engine.base import Sink
    from dynamo_vllm.job import Output
    from dynamo_vllm.serving.request.cancel import Watch
    from dynamo_vllm.serving.request.crash_notes import Note
    from dynamo_vllm.serving.request.egress import Stream
    from dynamo_vllm.serving.request.pace import Gathering


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


def outlet(
    encode: Callable[[Output], dict[str, Any]], stream: Stream, watch: Watch, note: Note, gathering: Gathering
) -> Sink:
    send, places, is_first, pace = stream.send, CHUNKS, True, gathering.pace

    def out(output: Output) -> None:
        nonlocal places, is_first
        if watch.is_over or output.finish == "abort":  # also if the abort came before the job started
            raise ClientLeft if watch.client_left else Draining(LEAVING)
        if is_first:
            is_first = watch.is_counted = False
            note.answered()
            gathering.begin(out)
        elif pace.seconds and gathering.keeps(output):
            return
        chunk = encode(output)
        try:
            if places:
                places -= 1
                send(chunk)
            else:
                places = stream.pass_on(chunk)
        except RuntimeError:  # the stream is closed; the context reports it a moment later
            watch.left()

    return out
