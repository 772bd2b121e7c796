"""Tests that series of several processes and of a connector's server appear once, in one text."""

from __future__ import annotations

import ast
import http.server
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_vllm.engine.process import prometheus
from harness import metrics

ENGINE = """
import os, sys
from prometheus_client import Counter, Gauge, Histogram
labels = {"model_name": "tiny", "worker_id": sys.argv[1]}
Counter("lmcache:num_hit_tokens", "", list(labels)).labels(**labels).inc(int(sys.argv[2]))
Counter("lmcache:num_requests", "").inc()
Gauge("lmcache:local_cache_usage", "", list(labels), multiprocess_mode="sum").labels(**labels).set(5)
Histogram("lmcache:time_to_retrieve", "", list(labels), buckets=(1.0,)).labels(**labels).observe(0.5)
"""
WORKER = """
from prometheus_client import Counter
from dynamo_vllm.engine.process import prometheus
Counter("vllm:generation_tokens", "").inc(3)
print(prometheus.series(), end="")
"""


TOTALS = """
from prometheus_client import Counter, Gauge
from dynamo_vllm.engine.process import prometheus
counter = Counter("vllm:a", "", ["engine", "source"])
for engine, source in (("0", "host"), ("1", "host"), ("1", "disk")):
    counter.labels(engine, source).inc(3)
Gauge("vllm:b", "", multiprocess_mode="sum").set(5)
print(prometheus.totals(["vllm:a_total", "vllm:b", "vllm:none"], "source"))
"""


def python(source: str, *words: str, folder: Path | None = None) -> str:
    """Runs code in a new process: prometheus_client reads its folder once, when it is imported."""
    env = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
    if folder is not None:
        env["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    done = subprocess.run([sys.executable, "-c", source, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def values(text: str) -> dict[str, float]:
    found = [(metrics.series(sample), sample.value) for sample in metrics.samples(text)]
    assert [name for name, count in Counter(name for name, _ in found).items() if count > 1] == []
    return dict(found)


def test_series_of_the_engines_processes_reach_the_worker_once(tmp_path: Path) -> None:
    python(ENGINE, "0", "1024", folder=tmp_path)
    python(ENGINE, "1", "256", folder=tmp_path)
    found = values(python(WORKER, folder=tmp_path))
    assert found['lmcache:num_hit_tokens_total{model_name="tiny",worker_id="0"}'] == 1024
    assert found['lmcache:num_hit_tokens_total{model_name="tiny",worker_id="1"}'] == 256
    assert found["lmcache:num_requests_total"] == 2
    assert found['lmcache:local_cache_usage{model_name="tiny",worker_id="0"}'] == 5
    assert found['lmcache:time_to_retrieve_count{model_name="tiny",worker_id="1"}'] == 1
    assert found["vllm:generation_tokens_total"] == 3
    alone = values(python(WORKER))  # without a folder a process shows its own
    assert alone["vllm:generation_tokens_total"] == 3
    assert not [name for name in alone if name.startswith("lmcache:")]


def test_a_worker_imports_no_prometheus_client_before_it_sets_the_folder() -> None:
    """prometheus_client reads its folder when it is imported; `set_environment` runs after these imports."""
    source = "import sys; import dynamo_vllm.serving.worker; print('prometheus_client' in sys.modules)"
    assert python(source).strip() == "False"


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 500)
            self.end_headers()
            self.wfile.write(b"# TYPE kvbm_matched_tokens counter\nkvbm_matched_tokens 7")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}"
        finally:
            made.shutdown()
            thread.join()


def test_series_of_a_connectors_own_server_are_added_as_whole_lines(server: str) -> None:
    text = prometheus.fetched(server + "/metrics")
    assert text.endswith("\n")
    assert values(text) == {"kvbm_matched_tokens_total": 7}, "a counter, as Prometheus' parser names it"


def test_a_proxy_of_the_machine_is_not_asked(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in a new process: urllib reads the proxies once."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    source = (
        f"from dynamo_vllm.engine.process import prometheus; print(prometheus.fetched('{server}/metrics'))"
    )
    assert values(python(source))


def test_a_server_that_fails_or_is_gone_hides_no_other_series(server: str) -> None:
    assert prometheus.fetched(server + "/broken") == ""
    assert prometheus.fetched("http://127.0.0.1:1/metrics") == ""


@pytest.mark.parametrize("processes", ["one", "several"])
def test_series_are_added_up_over_other_labels(tmp_path: Path, processes: str) -> None:
    found = python(TOTALS, folder=tmp_path if processes == "several" else None)
    assert ast.literal_eval(found) == {
        ("vllm:a_total", "host"): 6.0,
        ("vllm:a_total", "disk"): 3.0,
        ("vllm:b", ""): 5.0,
    }
