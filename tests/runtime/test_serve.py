"""`dynamo-vllm serve` as a person runs it: real processes, the real runtime, the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dynamo_vllm.cli.start import serve as command
from dynamo_vllm.models.tiny import make_tiny_model
from dynamo_vllm.supervise import run_folder
from dynamo_vllm.supervise.limits import SupervisorLimits
from dynamo_vllm.supervise.screen import Screen
from dynamo_vllm.supervise.supervisor import Supervisor
from harness import commands, metrics
from harness.listening import for_other_machines
from harness.processes import COMMAND, free_port
from harness.waiting import until

MARK = "DYNAMO_VLLM_TEST_MARK"
DEADLY = 499


class Serve:
    """One `serve`; every process it starts carries a mark of this run in its environment."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", *words, "--run-dir", str(folder / "run")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(folder, self.mark),
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_ready(self) -> Serve:
        until("the ready line", lambda: self._is_over() or "ready:" in self.out)
        assert re.fullmatch(r"ready: http://127\.0\.0\.1:\d+/v1 model=\S+ workers=\d+\n", self.out), self.err
        return self

    def _is_over(self) -> bool:
        return self.process.poll() is not None

    def assert_ends(self, code: int = 0) -> None:
        assert self.process.wait(60) == code, self.err
        assert self.pids() == []

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def url(self) -> str:
        return self.out.split()[1]

    def wait_workers(self, count: int) -> None:
        until(f"{count} workers", lambda: len(self.instances()) == count)

    @contextlib.contextmanager
    def streaming(self, tokens: int) -> Iterator[Iterator[str]]:
        """The lines of an answer after its first."""
        body = {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "stream": True}
        with httpx.stream("POST", f"{self.url}/completions", json=body, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            next(lines)
            yield lines

    def complete(self, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 2, **more}
        return httpx.post(f"{self.url}/completions", json=body, timeout=30)

    def models(self) -> list[str]:
        return sorted(model["id"] for model in httpx.get(f"{self.url}/models", timeout=30).json()["data"])

    def instances(self) -> list[int]:
        reply = httpx.get(f"{self.url.removesuffix('/v1')}/instances", timeout=30).json()
        return [found["instance_id"] for found in reply["instances"] if found["endpoint"] == "generate"]

    def pids(self, kind: str = "") -> list[int]:
        """Processes of this run that are alive: all, or the workers or the frontend only."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if (
                    alive
                    and process.environ().get(MARK) == self.mark
                    and (not kind or kind in process.cmdline())
                ):
                    found.append(process.pid)
        return found

    def scraped(self) -> list[tuple[str, str]]:
        """The job and address of everything Prometheus would ask, by job."""
        groups = json.loads((self.folder / "run" / "prometheus.json").read_text())
        return sorted(
            (group["labels"]["job"], f"{group['labels']['__scheme__']}://{target}/metrics")
            for group in groups
            for target in group["targets"]
        )

    def log(self, name: str) -> str:
        return (self.folder / "run" / "logs" / f"{name}.log").read_text()


def environment(folder: Path, mark: str = "") -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "VLLM_"))}
    return {
        **kept,
        "XDG_CACHE_HOME": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        MARK: mark,
        "DYN_VLLM_CONSOLE": "0",
    }


Start = Callable[..., Serve]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `serve` with these words; at the end nothing of it is left, whatever happened."""
    begun: list[Serve] = []

    def begin(*words: str) -> Serve:
        begun.append(Serve(tmp_path, *words))
        return begun[-1]

    yield begin
    for serve in begun:
        for pid in serve.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        serve.process.wait(60)


def fake(model: Path, **spec: float) -> tuple[str, ...]:
    behaviour = json.dumps({"vocab_size": 500, **spec})
    engine = ("--engine", "fake", "--fake-engine", behaviour)
    return (str(model), "--served-model-name", "tiny", "--port", "0", *engine)


# --- the start ------------------------------------------------------------------------------------------


def test_two_models_are_served_whichever_comes_first(start: Start, model: Path, tmp_path: Path) -> None:
    """The runtime lets one endpoint have one model; when two come at once it does not notice."""
    file = tmp_path / "serve.yaml"
    groups = (
        f"{{model: {folder}, engine: fake, served_model_name: [{name}], "
        f"fake_engine: {{vocab_size: 500, start_ms: {late}}}}}"
        for name, folder, late in (("one", model, 0), ("two", make_tiny_model(tmp_path / "two"), 800))
    )
    file.write_text(f"workers: [{', '.join(groups)}]\n")
    serve = start("--config", str(file), "--port", "0").wait_ready()
    assert serve.models() == ["one", "two"]
    more = {"nvext": {"extra_fields": ["worker_id"]}}
    answers = [serve.complete(model=name, **more).json() for name in ("one", "two", "one", "two")]
    who = [answer["nvext"]["worker_id"]["decode_worker_id"] for answer in answers]
    assert who[:2] == who[2:] and who[0] != who[1]


def test_prefill_and_decode_workers_share_every_request(start: Start, model: Path) -> None:
    serve = start(*fake(model), "--prefill", "2", "--decode", "2").wait_ready()
    assert serve.out.endswith("workers=4\n")
    reply = serve.complete(prompt=[20] * 8, nvext={"extra_fields": ["worker_id", "engine_data"]}).json()
    prefill, decode = (reply["nvext"]["worker_id"][f"{role}_worker_id"] for role in ("prefill", "decode"))
    assert reply["nvext"]["engine_data"]["decode_cached_tokens"] == 7, "decode took the cache over"
    serve.wait_workers(4)
    told = [line.split()[:2] for line in status(serve).splitlines() if line.endswith(("yes", "no"))]
    roles = {int(instance): role for instance, role in told}
    assert sorted(roles.values()) == ["decode", "decode", "prefill", "prefill"]
    assert (roles[prefill], roles[decode]) == ("prefill", "decode")
    assert "prefill-2: ready" in serve.err and "decode-2: ready" in serve.err
    until("loopback only", lambda: for_other_machines(serve.pids()) == [])


def status(serve: Serve) -> str:
    return commands.output(None, "status", serve.url.removesuffix("/v1"))


def test_other_users_see_no_secret(start: Start, model: Path, tmp_path: Path) -> None:
    """In the command line of any process below serve, or in its files."""
    secret = "hush-" + uuid.uuid4().hex
    words = ("--nats-server", f"nats://user:{secret}@127.0.0.1:4222", "--admin-token", secret)
    serve = start(
        *fake(model), *words, "--otlp-endpoint", f"http://user:{secret}@127.0.0.1:4317"
    ).wait_ready()
    children = [pid for pid in serve.pids() if pid != serve.process.pid]
    assert len(children) >= 2
    for pid in children:
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            assert path.stat().st_mode & 0o077 == 0, path


def test_taken_port_is_refused_at_once(start: Start, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve = start(*fake(model), "--port", str(port))
        serve.assert_ends(1)
    assert f"error: --port {port} on 127.0.0.1 cannot be used" in serve.err


def test_worker_that_cannot_start_ends_serve_with_its_reason(start: Start, model: Path) -> None:
    serve = start(*fake(model, refuse_start=True))
    serve.assert_ends(1)
    assert "error: worker-1 exited with code 1: the fake engine is set not to start" in serve.err
    assert f"log: {serve.folder}/run/logs/worker-1.log" in serve.err


def test_start_that_takes_too_long_has_failed(start: Start, model: Path) -> None:
    serve = start(*fake(model, start_ms=60_000), "--start-seconds", "2")
    serve.assert_ends(1)
    assert re.search(
        r"^error: (worker-1|frontend) was not ready after 2 s \(--start-seconds\)", serve.err, re.M
    )


# --- keeping it up --------------------------------------------------------------------------------------


def test_killed_prefill_worker_is_not_asked_again(start: Start, model: Path, tmp_path: Path) -> None:
    """Its lease would keep it in discovery for ten seconds, and every request would fail."""
    file = tmp_path / "serve.yaml"
    engine = "engine: fake, connector: [nixl], served_model_name: [tiny], fake_engine: {vocab_size: 500}"
    file.write_text(
        f"model: {model}\nworkers:\n- {{role: prefill, {engine}}}\n- {{role: decode, {engine}}}\n"
    )
    serve = start("--config", str(file), "--port", "0").wait_ready()
    (prefill,) = [
        pid
        for pid in serve.pids("worker")
        if "--disaggregation-mode=prefill" in psutil.Process(pid).cmdline()
    ]
    gone = set(serve.instances())
    os.kill(prefill, signal.SIGKILL)
    until("it to leave discovery", lambda: not gone <= set(serve.instances()))
    for _ in range(5):
        # While the first prefill worker joins, the frontend (1.6.1) may answer 503 for a moment.
        assert serve.complete().status_code == 200 or len(serve.instances()) == 2
    serve.wait_workers(2)
    until("answers with it", lambda: serve.complete().status_code == 200)


def test_killed_worker_and_frontend_are_replaced(start: Start, model: Path) -> None:
    """Prometheus is told where everything is, the new ones too, and a long log is put aside meanwhile."""
    serve = start(*fake(model), "--log-mb", "0.0002", "--log-parts", "1").wait_ready()
    assert [job for job, _ in serve.scraped()] == ["dynamo-vllm-frontend", "dynamo-vllm-worker"]
    (worker,) = serve.pids("worker")
    os.kill(worker, signal.SIGKILL)
    until("another worker", lambda: set(serve.pids("worker")) - {worker})
    until("an answer", lambda: serve.complete().status_code == 200)
    assert "worker-1 was killed by SIGKILL; starting it again in 0 s" in serve.err
    os.kill(serve.pids("frontend")[0], signal.SIGKILL)

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return serve.complete().status_code == 200
        return False

    until("an answer on the same port", answers)
    (_, of_frontend), (_, of_worker) = serve.scraped()
    assert "dynamo_frontend_requests_total" in httpx.get(of_frontend, timeout=30).text
    assert "dynamo_component_worker_state" in httpx.get(of_worker, timeout=30).text
    until("an older part", lambda: (serve.folder / "run" / "logs" / "worker-1.log.1").exists())


def test_request_that_ends_engines_ends_two_and_no_more(start: Start, model: Path) -> None:
    serve = start(*fake(model, die_on_token=DEADLY), "--workers", "4").wait_ready()
    for times, stream in ((1, False), (2, True)):
        serve.wait_workers(4)
        assert serve.complete(prompt=[DEADLY, times], stream=stream).status_code == 503
        until("both to be said", partial(has_said, serve, "exited with code 3", 2 * times))
        lines = [line for n in range(1, 5) for line in serve.log(f"worker-{n}").splitlines()]
        assert len([line for line in lines if " WARNING " in line and "not tried again" in line]) == times
    serve.wait_workers(4)
    assert serve.complete().status_code == 200
    assert serve.err.count("exited with code 3") == 4


def test_request_on_which_workers_are_killed_takes_two_and_no_more(start: Start, model: Path) -> None:
    """As the kernel does when memory is short: the worker itself goes, and can tell nobody."""
    serve = start(*fake(model, stall_on_token=DEADLY), "--workers", "4").wait_ready()
    serve.wait_workers(4)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(serve.complete, prompt=[DEADLY])
        for killed in (1, 2):
            until("a worker to have it", lambda: holders(serve))
            os.kill(holders(serve)[0], signal.SIGKILL)
            until("its end to be said", partial(has_said, serve, "was killed by SIGKILL", killed))
        assert answer.result(60).status_code == 503
    assert serve.err.count("was killed by SIGKILL") == 2


def test_answer_that_has_begun_outlives_two_workers(start: Start, model: Path) -> None:
    serve = start(*fake(model, token_ms=20), "--workers", "3").wait_ready()
    serve.wait_workers(3)
    body = {"model": "tiny", "prompt": [20, 21], "max_tokens": 600, "stream": True}
    with httpx.stream("POST", f"{serve.url}/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        for _ in range(2):
            next(lines)
            os.kill(until("a worker to have it", lambda: holders(serve))[0], signal.SIGKILL)
        assert sum(len(json.loads(line[6:])["choices"]) for line in lines) >= 450


def has_said(serve: Serve, words: str, times: int) -> bool:
    return serve.err.count(words) == times


def holders(serve: Serve) -> list[int]:
    """The workers that have a request."""
    found = []
    for pid in serve.pids("worker"):
        with contextlib.suppress(psutil.Error, httpx.HTTPError, ValueError):
            words = psutil.Process(pid).cmdline()
            port = words[words.index("--system-port") + 1]
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
            if metrics.total(text, "dynamo_component_requests_in_flight"):
                found.append(pid)
    return found


async def test_hung_worker_is_replaced(model: Path, tmp_path: Path) -> None:
    limits = SupervisorLimits(look_seconds=0.1, answer_seconds=0.5, hang_seconds=1.0)
    async with supervised(tmp_path, limits, *fake(model)) as err:
        worker().suspend()
        await said(err, "worker-1: ready", times=2)
    assert re.search(r"worker-1 did not answer for \d+ s; starting it again in 0 s", err.getvalue())


async def test_sleeping_worker_is_left_alone(model: Path, tmp_path: Path) -> None:
    limits = SupervisorLimits(look_seconds=0.1, unwell_seconds=1.0)
    port = free_port()
    async with supervised(tmp_path, limits, *fake(model), "--system-port", str(port)) as err:
        sleeping = worker()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            assert (await client.post("/engine/sleep", json={})).status_code == 200
            began = time.monotonic()
            while time.monotonic() - began < 2 * limits.unwell_seconds:
                health = await client.get("/health")
                assert (health.status_code, sleeping.is_running()) == (503, True), err.getvalue()
                await asyncio.sleep(limits.look_seconds)
            assert (await client.post("/engine/wake_up")).json()["already"] is False


async def test_worker_that_does_not_leave_is_killed(model: Path, tmp_path: Path) -> None:
    async with supervised(
        tmp_path, SupervisorLimits(stop_seconds=1.0), *fake(model), "--drain-seconds", "0"
    ) as err:
        stopped = worker()
        stopped.suspend()
    assert "worker-1 did not stop within 1 s: killed" in err.getvalue()
    assert not stopped.is_running()


@contextlib.asynccontextmanager
async def supervised(folder: Path, limits: SupervisorLimits, *words: str) -> AsyncIterator[io.StringIO]:
    """A supervisor in this process, for limits no flag sets: what it says; it is stopped at the end."""
    environ = environment(folder)
    run = run_folder.choose(str(folder / "run"), environ)
    _, wanted = command.understand(words, environ)
    plan = command.prepare(wanted, environ, run)
    err = io.StringIO()
    with run.opened():
        life = asyncio.create_task(Supervisor(plan, limits, run, Screen(io.StringIO(), err)).run())
        await said(err, "worker-1: ready")
        yield err
        os.kill(os.getpid(), signal.SIGTERM)
        assert await life == 0


def worker() -> psutil.Process:
    (found,) = [process for process in psutil.Process().children() if "worker" in process.cmdline()]
    return found


async def said(text: io.StringIO, words: str, times: int = 1) -> None:
    await asyncio.to_thread(until, words, lambda: text.getvalue().count(words) >= times)


# --- the end --------------------------------------------------------------------------------------------


def test_interrupt_lets_a_stream_finish_and_leaves_nothing(start: Start, model: Path) -> None:
    serve = start(*fake(model, token_ms=100)).wait_ready()
    with serve.streaming(15) as lines:
        serve.signal(signal.SIGINT)
        rest = list(lines)
    assert len(rest) >= 14
    assert '"finish_reason":"length"' in "".join(rest)
    serve.assert_ends()
    assert not (serve.folder / "run" / "discovery").exists()
    assert not (serve.folder / "run" / "prometheus.json").exists()
    assert "stopping:" in serve.err


@pytest.mark.more
@pytest.mark.parametrize("whom", ["serve", "worker", "frontend"])
def test_hangup_drains_as_a_termination_does(start: Start, model: Path, whom: str) -> None:
    """A terminal that goes sends several: they do not cut the drain short."""
    serve = start(*fake(model, token_ms=400)).wait_ready()
    (pid,) = [serve.process.pid] if whom == "serve" else serve.pids(whom)
    with serve.streaming(15) as lines:
        for _ in range(3):
            os.kill(pid, signal.SIGHUP)
            next(lines)
        rest = list(lines)
    assert len(rest) >= 10 and '"finish_reason":"length"' in "".join(rest)
    if whom == "serve":
        serve.assert_ends()
    else:
        name = "frontend" if whom == "frontend" else "worker-1"
        until("its end", lambda: f"{name} exited with code" in serve.err)
        assert f"{name} exited with code 0;" in serve.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_during_the_start_ends_it(start: Start, model: Path, number: int) -> None:
    serve = start(*fake(model, start_ms=60_000))
    until("the worker loads", lambda: "worker-1: loading" in serve.err)
    serve.signal(number)
    serve.assert_ends()
    assert serve.out == ""


def test_second_interrupt_ends_at_once(start: Start, model: Path) -> None:
    """Requests would get an hour to finish."""
    serve = start(*fake(model, token_ms=2000), "--drain-seconds", "3600").wait_ready()
    with serve.streaming(1000):
        serve.signal(signal.SIGINT)
        until("the drain", lambda: "draining 1 requests" in serve.log("worker-1"))
        serve.signal(signal.SIGINT)
        serve.assert_ends(130)


@pytest.mark.parametrize(("mode", "is_paused_first"), [("keep", True), ("wait", False)])
def test_paused_and_stopped_worker_that_is_asked_to_leave_ends(
    start: Start, model: Path, mode: str, is_paused_first: bool
) -> None:
    """The pause, SIGSTOP, SIGTERM and SIGCONT in one go, with an answer on its way."""
    port = free_port()
    flags = ("--system-port", str(port), "--drain-seconds", "30")
    serve = start(*fake(model, token_ms=20), *flags).wait_ready()
    (leaving,) = serve.pids("worker")

    def pause() -> None:
        with contextlib.suppress(httpx.HTTPError):  # it may be cut off with its worker
            httpx.post(f"http://127.0.0.1:{port}/engine/pause", json={"mode": mode}, timeout=60)

    with ThreadPoolExecutor() as pool, serve.streaming(60) as lines:
        paused = pool.submit(pause)
        if is_paused_first:
            paused.result(60)
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            os.kill(leaving, number)
        rest = list(lines)
        paused.result(60)
    assert '"finish_reason":"length"' in "".join(rest)
    until("its end", lambda: "worker-1 exited with code 0; starting it again" in serve.err)
    until("an answer of the next", lambda: serve.complete().status_code == 200)
    assert "killed" not in serve.err
    serve.signal(signal.SIGTERM)
    serve.assert_ends()


def test_serve_ends_while_its_paused_worker_is_stopped_and_goes_on(start: Start, model: Path) -> None:
    port = free_port()
    serve = start(*fake(model, token_ms=20), "--system-port", str(port)).wait_ready()
    (leaving,) = serve.pids("worker")
    httpx.post(f"http://127.0.0.1:{port}/engine/pause", json={"mode": "keep"}, timeout=60)
    os.kill(leaving, signal.SIGSTOP)
    serve.signal(signal.SIGTERM)
    until("the wish to be heard", lambda: "stopping:" in serve.err)
    os.kill(leaving, signal.SIGCONT)
    serve.assert_ends()
    assert "killed" not in serve.err


def test_killed_serve_leaves_nothing_and_workers_drain(start: Start, model: Path) -> None:
    serve = start(*fake(model), "--workers", "2").wait_ready()
    assert len(serve.pids()) == 4
    serve.signal(signal.SIGKILL)
    until("every process of this run to be gone", lambda: not serve.pids())
    assert "drained in" in serve.log("worker-1")
    assert "drained in" in serve.log("worker-2")
