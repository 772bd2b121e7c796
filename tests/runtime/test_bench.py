"""`dynamo-vllm bench load` as a person runs it: against the real frontend, and against servers that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamo_vllm.bench.report import plots
from dynamo_vllm.errors import ConfigError
from harness import commands, sse
from harness.processes import COMMAND
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake

pytestmark = pytest.mark.more


def command(*words: str) -> list[str]:
    return [*COMMAND, "bench", "load", *words]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return commands.run(None, "bench", "load", *words, seconds=100)


def figures(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["stages"]
    return found


# --- the real frontend ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("running")) as made:
        made.start_frontend()
        made.start_worker(*fake(model, vocab_size=1121, token_ms=2, prefill_ms=20))  # the tokenizer's
        yield made.wait_ready()


SMALL = ("--output-tokens", "8", "--input-tokens", "16")


def test_stages_over_two_client_processes_are_measured_and_drawn(running: Stack, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, drawn = tmp_path / "out.json", tmp_path / "new" / "plots"
    words = ("--concurrency", "1,4", "--requests", "12", *SMALL, "--warmup", "2", "--clients", "2")
    more = ("--watch", f"worker={running.workers[0].pid}", "--slo", "ttft=60000,itl=60000")
    done = bench(running.url, *words, *more, "--json", str(out), "--plots", str(drawn))
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:5]] == ["c=1", "c=4"]
    stages = figures(out)
    assert len(stages) == 2
    for stage in stages:
        assert stage["requests"]["ok"] == 12 and not stage["errors"]
        assert (stage["tokens"]["prompt"], stage["tokens"]["output"]) == (12 * 16, 12 * 8)
        assert 20 <= stage["ttft_ms"]["p50"] <= stage["ttft_ms"]["max"]
        assert stage["itl_ms"]["mean"] > 1
        # A client that is late for the first token reads it together with others.
        assert stage["e2e_ms"]["p50"] >= max(stage["ttft_ms"]["p50"], 20 + 7 * 2)
        assert stage["requests"]["per_second"] == pytest.approx(12 / stage["seconds"], rel=0.01)
        assert stage["goodput"]["fraction"] == 1.0
        assert stage["processes"]["worker"]["tree_cpu_seconds"] >= stage["processes"]["worker"]["cpu_seconds"]
        assert stage["client"]["processes"] == 2
    names = {path.name for path in drawn.iterdir()}
    assert names == {f"{n}.{k}" for n in ("ttft", "itl", "stages", "timeline") for k in ("svg", "png")}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.glob("*.png"))
    assert all("<svg" in path.read_text() for path in drawn.glob("*.svg"))


def test_missing_library_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'dynamo-vllm\[bench\]'"):
        plots.require(tmp_path)


def test_progress_goes_to_the_descriptor_that_is_named(running: Stack) -> None:
    read_end, write_end = os.pipe()
    words = command(running.url, "--requests", "4", "--quiet", "--progress", "json")
    words += ["--progress-fd", str(write_end)]
    with open(read_end) as told:
        done = subprocess.run(words, pass_fds=[write_end], capture_output=True, text=True, timeout=100)
        os.close(write_end)
        (last,) = [json.loads(line) for line in told if '"ended": true' in line]
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert last["ok"] == 4
    refused = bench(running.url, "--progress", "json", "--progress-fd", "77")
    assert (refused.returncode, "--progress-fd 77 cannot be written" in refused.stderr) == (2, True)


# --- servers that fail ------------------------------------------------------------------------------------


def test_stage_without_an_answer_is_a_failure(tmp_path: Path) -> None:
    def script(request: sse.Request) -> Iterator[bytes]:
        if request.body is None or request.body["max_tokens"] == 1:  # the first, short request
            return sse.answer(request)
        return iter([sse.plain(503, b'{"message": "busy"}')])

    with sse.served(script) as server:
        out = ("--json", str(tmp_path / "out.json"), "--plots", str(tmp_path / "plots"))
        done = bench(server.url, "--requests", "4", *out)
    assert done.returncode == 1
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 4, "drawn all the same"
    assert "error: c=8: 4 × HTTP 503: busy" in done.stdout
    (stage,) = figures(tmp_path / "out.json")
    assert (stage["requests"]["failed"], stage["errors"]) == (4, {"HTTP 503: busy": 4})
    assert stage["ttft_ms"]["p50"] is None


def test_interrupt_prints_what_there_is_and_leaves_no_process(tmp_path: Path) -> None:
    def script(request: sse.Request) -> Iterator[bytes]:
        if request.body is None or len(server.asked) <= 6:
            return sse.answer(request)
        return iter([sse.HEAD, sse.chunk(sse.token())])  # and never the rest

    with sse.served(script) as server:
        words = [server.url, "--concurrency", "2", "--seconds", "60", "--json", "-", "--clients", "2"]
        process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until("both slots to wait", lambda: len(server.asked) == 8)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads(out)
    (stage,) = found["stages"]
    assert found["interrupted"] and stage["requests"]["ok"] == 5 and stage["requests"]["unfinished"] == 2
    assert "stopped early" in err
    assert len(children) == 2 and not any(child.is_running() for child in children)


def test_client_process_that_dies_is_told(tmp_path: Path) -> None:
    with sse.served(
        lambda request: sse.answer(request) if request.body is None or len(server.asked) < 2 else []
    ) as server:
        process = subprocess.Popen(
            command(server.url, "--seconds", "60", "--clients", "1"),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        until("the load", lambda: len(server.asked) >= 2)
        (child,) = psutil.Process(process.pid).children()
        child.kill()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: a client process ended with exit code -9" in err


def test_cached_tokens_come_from_the_metrics_of_engines(tmp_path: Path) -> None:
    def script(request: sse.Request) -> Iterator[bytes]:
        if request.path != "/metrics":
            return sse.answer(request)
        hits = 100 + 3 * len(server.asked)
        return iter([sse.plain(200, b'vllm:prefix_cache_hits_total{engine="0"} %d\n' % hits)])

    with sse.served(script) as server:
        out = tmp_path / "out.json"
        done = bench(
            server.url, "--requests", "5", "--metrics-url", f"{server.url}/metrics", "--json", str(out)
        )
    assert done.returncode == 0, done.stderr
    (stage,) = figures(out)
    assert (stage["tokens"]["cached"], stage["tokens"]["cached_from"]) == (15, "metrics")
