"""Traces: lengths, tokens and what a cache could do with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_vllm.bench.load import trace
from dynamo_vllm.errors import ConfigError

VOCAB = (10, 900)


def line(at: int, length: int, answer: int, ids: list[int]) -> trace.Line:
    return trace.Line(at, length, answer, ids)


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in lines))
    return path


def entry(at: int = 0, length: int = 600, ids: tuple[int, ...] = (1, 2)) -> dict[str, object]:
    return {"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": list(ids)}


def scaled(*lines: trace.Line, block: int = 512, context: int | None = None) -> trace.Trace:
    return trace.scale(lines, block=block, speed=1.0, context=context)


# --- the file ---------------------------------------------------------------------------------------------


def test_lines_come_in_the_order_of_their_times_up_to_a_limit(tmp_path: Path) -> None:
    path = written(tmp_path, entry(30), entry(10), entry(20))
    assert [found.timestamp for found in trace.read(path)] == [10, 20, 30]
    assert len(trace.read(written(tmp_path, *[entry()] * 5), limit=3)) == 3
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        trace.read(tmp_path / "none")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "contains no request"),
        ([entry(), {"timestamp": 1}], "trace.jsonl:2: Object missing required field"),
        ([entry(length=1025)], "1025 tokens need one hash id per 512; the line has 2"),
        ([entry(length=0)], "0 tokens need one hash id"),
    ],
)
def test_unreadable_trace_is_refused(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace.read(written(tmp_path, *lines))


# --- lengths and tokens -----------------------------------------------------------------------------------


def test_smaller_blocks_shorten_prompt_and_answer_alike() -> None:
    (found,) = scaled(line(0, 1030, 100, [1, 2, 3]), block=32).requests
    assert (found.input_tokens, found.output_tokens) == (65, 7)


def test_speed_shortens_the_time_between_requests() -> None:
    lines = [line(1000, 5, 5, [1]), line(3000, 5, 5, [1])]
    found = trace.scale(lines, block=512, speed=4.0, context=None)
    assert [request.at for request in found.requests] == [0.0, 0.5]


def test_what_does_not_fit_the_context_is_cut_and_counted() -> None:
    found = scaled(line(0, 1000, 50, [1, 2]), line(0, 100, 50, [1]), line(0, 9, 900, [1]), context=500)
    assert [(r.input_tokens, r.output_tokens) for r in found.requests] == [(450, 50), (100, 50), (1, 499)]
    assert found.clipped == 2


def test_equal_ids_give_equal_tokens_and_others_do_not() -> None:
    first, second = scaled(line(0, 1100, 5, [1, 2, 3]), line(0, 1500, 5, [1, 2, 9]), block=32).requests
    a, b = (trace.prompt_ids(request, 1, VOCAB) for request in (first, second))
    assert (len(a), len(b)) == (first.input_tokens, second.input_tokens)
    assert a[:64] == b[:64] and a[64:] != b[64 : len(a)]
    assert all(VOCAB[0] <= token < VOCAB[1] for token in a + b)
    assert trace.prompt_ids(first, 1, VOCAB) == a != trace.prompt_ids(first, 2, VOCAB)


# --- the ceiling ------------------------------------------------------------------------------------------


def test_infinite_cache_finds_every_shared_block() -> None:
    requests = scaled(*(line(n, 3 * 512, 5, [1, 2, 10 + n]) for n in range(4)), block=32).requests
    found = trace.ceiling(requests, 16)
    assert found.prompt_tokens == 4 * 96
    assert found.cached_tokens == 3 * 64
    assert found.rate == 0.5


def test_last_token_is_always_computed() -> None:
    requests = scaled(*(line(n, 512, 5, [1]) for n in range(3)), block=32).requests
    assert trace.ceiling(requests, 16).cached_tokens == 2 * 16
    assert trace.ceiling(requests, 32).cached_tokens == 0


def test_same_id_behind_another_beginning_is_no_hit() -> None:
    requests = scaled(line(0, 1024, 5, [1, 2]), line(0, 1536, 5, [3, 2, 2])).requests
    assert trace.ceiling(requests, 512).cached_tokens == 0
    mixed = scaled(*(line(0, 1025, 5, [*ids, 9]) for ids in ([1, 2], [3, 4], [1, 4]))).requests
    assert trace.ceiling(mixed, 512).cached_tokens == 512


def test_block_of_the_engine_larger_than_that_of_the_trace() -> None:
    lines = (line(0, 4 * 512, 5, [1, 2, 3, 4]), line(0, 5 * 512, 5, [1, 2, 3, 9, 9]))
    found = trace.ceiling(scaled(*lines, block=16).requests, 32)
    assert found.cached_tokens == 32, "the second block of 32 holds a part that differs"


def test_small_cache_forgets_what_was_unused_for_longest() -> None:
    def prompts(*numbers: int) -> list[trace.TraceRequest]:
        return scaled(*(line(0, 1025, 5, [n, n + 100, n + 200]) for n in numbers)).requests

    assert trace.ceiling(prompts(1, 2, 1, 2), 512, cache_blocks=4).cached_tokens == 4 * 512
    assert trace.ceiling(prompts(1, 2, 3, 1), 512, cache_blocks=4).cached_tokens == 0
    assert trace.ceiling(prompts(1, 2, 1, 3, 1), 512, cache_blocks=4).cached_tokens == 4 * 512


def test_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    requests = scaled(line(0, 2048, 5, [1, 2, 3, 4]), line(0, 1025, 5, [1, 2, 9])).requests
    assert trace.ceiling(requests, 512, cache_blocks=2).cached_tokens == 2 * 512
