"""From options to stages."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.bench.http.answers import Answer
from dynamo_vllm.bench.http.stream_client import StreamClient
from dynamo_vllm.bench.http.target import Target, parse_target
from dynamo_vllm.bench.load import messages, stage_specs, trace
from dynamo_vllm.bench.load.generator import Stage
from dynamo_vllm.config.options import LoadOptions
from dynamo_vllm.errors import ConfigError

NO_TRACE = trace.Trace([])


def stages(
    context: int | None = None, replay: trace.Trace = NO_TRACE, **given: Any
) -> list[messages.StageSpec]:
    return stage_specs.stages(LoadOptions(**given), "tiny", context, replay)


def test_options_make_stages() -> None:
    (stage,) = stages()
    assert (stage.name, stage.concurrency, stage.rate) == ("c=8", 8, None)
    assert (stage.requests, stage.seconds) == (None, 10.0)
    found = stages(concurrency="1,8,32", requests=5)
    assert [stage.name for stage in found] == ["c=1", "c=8", "c=32"]
    assert [stage.seconds for stage in found] == [None] * 3
    assert len({stage.prompts.stage for stage in found}) == 3, "they ask different things"
    assert [stage.rate for stage in stages(rate="0.5,2")] == [0.5, 2.0]
    assert [stage.name for stage in stages(ramp="1:3:3")] == ["rate=1", "rate=2", "rate=3"]


def test_trace_keeps_its_times_unless_a_load_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text(f"{json.dumps(line)}\n" * 3)
    given: dict[str, Any] = {"prompts": "trace", "trace": str(path)}
    options = LoadOptions(**given, trace_block=16)
    replay = stage_specs.replay(options, stage_specs.trace_lines(options), 4096)
    (stage,) = stages(replay=replay, **given)
    assert (stage.name, stage.concurrency, stage.rate, stage.requests) == ("trace", None, None, 3)
    (stage,) = stages(replay=replay, **given, concurrency="2", requests=50)
    assert (stage.concurrency, stage.requests) == (2, 3)


@pytest.mark.parametrize(
    "given",
    [{"input_tokens": 90}, {"prompts": "prefix", "prefix_tokens": 70}, {"prompts": "turns", "turns": 3}],
)
def test_what_cannot_fit_the_context_is_refused(given: dict[str, Any]) -> None:
    base: dict[str, Any] = {"input_tokens": 20, "output_tokens": 20}
    stages(context=100, **base)
    with pytest.raises(ConfigError, match="and the model's context is 100"):
        stages(context=100, **base | given)


def test_half_the_cores_are_for_the_server() -> None:
    assert [stage_specs.client_count(LoadOptions(), cores) for cores in (1, 2, 3, 16)] == [1, 1, 1, 8]
    assert stage_specs.client_count(LoadOptions(clients=3), 16) == 3


@pytest.mark.parametrize("given", [{"concurrency": "5", "requests": 23}, {"rate": "5", "requests": 23}])
async def test_client_processes_share_the_work_by_their_slots_without_rest(given: dict[str, Any]) -> None:
    client = StreamClient(parse_target("127.0.0.1"), "/", 1.0)
    (spec,) = stages(**given)
    shares = [list(Stage(spec, client, part, 3)._numbers()) for part in range(3)]
    assert sorted(itertools.chain(*shares)) == list(range(23))
    assert all(shares)
    (spec,) = stages(concurrency="3", requests=12)
    assert [len(list(Stage(spec, client, part, 2)._numbers())) for part in range(2)] == [8, 4]


def test_urls() -> None:
    for url, found in {
        "host:8000": Target("host", 8000, False, ""),
        "http://host/": Target("host", 80, False, ""),
        "https://host/v1": Target("host", 443, True, ""),
        "http://[::1]:8000/some/v1/": Target("::1", 8000, False, "/some"),
    }.items():
        assert parse_target(url) == parse_target(found.url) == found
    for url in ("ftp://host", "http://", "http://host:port", "http://host:99999"):
        with pytest.raises(ConfigError, match="write http://host:port"):
            parse_target(url)


def test_progress_counts_tokens_where_an_event_brings_several() -> None:
    (spec,) = stages()
    stage = Stage(spec, StreamClient(parse_target("127.0.0.1"), "/", 1.0), 0, 1)
    stage._keep(Answer(sent=1.0, events=2, output_tokens=8))
    stage._keep(Answer(sent=1.0, events=2, error="cut off"))
    assert stage.progress().tokens == 10
