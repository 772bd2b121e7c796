"""Prefill and decode, tiers, LMCache and KVBM on one GPU, each in a stack of its own; exits 1 if one fails.

python scripts/gpu/disaggregation.py [STEP …] [--model FOLDER] [--logs FOLDER] [-- vLLM flags …]

The steps, in the order they run; none named runs all of them:
  reference     one engine answers 50 prompts of 1 to 1500 tokens; the others compare with it
  nixl          the same prompts through a prefill and a decode engine over NIXL
  lost-prefill  that prefill worker is killed; the decode worker lives on
  offload       the same prompts come back from host memory, and not after clear-kv or sleep
  offload-nixl  the prompts through a pair, both engines with tiers too
  lmcache       a prompt pushed out of a small engine cache comes back from LMCache
  lmcache-nixl  the prompts through a pair, the prefill engine with LMCache too
  lmcache-mp    prompts pushed out of a small engine cache come back from LMCache's own server
  kvbm          a prompt pushed out of a small engine cache comes back from KVBM
  kvbm-nixl     the prompts through a pair, the prefill engine with KVBM too
  clean         no process and no GPU memory is left

A step ends with "not possible" only where a package cannot be loaded at all, or where the worker refuses a
connector by name; that does not fail the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


from harness import metrics, processes
from harness.processes import COMMAND, Started, free_port
from harness.waiting import until

MODEL_NAME = "tested"
START_SECONDS = 240
STEP_SECONDS = 480
GIB_PER_ENGINE = 8
LOADS = {
    "offload": "import vllm.v1.kv_offload.tiering.spec",
    "lmcache": "import lmcache; lmcache.device_ops; import lmcache.integration.vllm.vllm_v1_adapter",
    "lmcache-mp": "import lmcache.v1.multiprocess.server, lmcache.integration.vllm.utils",
    "kvbm": "import kvbm._core; from kvbm.vllm_integration.connector import DynamoConnector, PdConnector",
    "nixl": "from nixl._api import nixl_agent",
}


class NotPossible(Exception):
    """A package cannot be loaded here, or must not be used."""


@dataclass
class Row:
    step: str
    seconds: float
    result: str
    said: str


# --- a deployment ---------------------------------------------------------------------------------------


def get(url: str) -> str | None:
    """The body of a good answer."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return None


@dataclass
class Process(Started):
    """A frontend or worker and the port it listens at."""

    port: int

    def metric(self, name: str) -> float:
        """The sum over a metric's series."""
        return metrics.total(get(f"http://127.0.0.1:{self.port}/metrics") or "", name)

    def tell(self, verb: str) -> None:
        """Ask for an admin verb; raises if it is refused."""
        url = f"http://127.0.0.1:{self.port}/engine/{verb}"
        request = urllib.request.Request(url, b"{}", {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120):
            pass

    def last_error(self) -> str:
        """The last line that names an error, other than vLLM's remark that there was one."""
        lines = [line for line in self.written().splitlines() if line.strip()]
        named = [
            line
            for line in lines
            if re.search(r"\b\w*(Error|Exception)\b|error:", line) and "root cause" not in line
        ]
        return (named or lines or ["it wrote nothing"])[-1][-400:]


@dataclass
class Answer:
    text: str
    cached: int


@dataclass
class Stack:
    """A frontend and workers, with a folder of their own for discovery and logs."""

    folder: Path
    model: str
    flags: list[str]
    processes: list[Process] = field(default_factory=list)
    url: str = ""
    command: Sequence[str] = COMMAND

    def start_frontend(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._start("frontend", ["frontend", "--port", str(port)], port, {})
        until("the frontend to listen", lambda: get(self.url + "/v1/models"))

    def start_worker(self, name: str, *args: str, env: dict[str, str] | None = None) -> Process:
        """Start one and wait for it: vLLM measures free memory, and a second start at once upsets that."""
        port = free_port()
        words = ["--model", self.model, "--served-model-name", MODEL_NAME, "--system-port", str(port)]
        made = self._start(name, ["worker", *words, *self.flags, *args], port, env or {})

        def is_ready() -> bool:
            if made.poll() is not None:
                if made.popen.returncode == 2 and "error: the connector " in made.last_error():
                    raise NotPossible(made.last_error())
                raise RuntimeError(
                    f"{name} ended with {made.popen.returncode}: {made.last_error()} ({made.log})"
                )
            return get(f"http://127.0.0.1:{port}/health") is not None

        until(f"{name} to be ready, see {made.log}", is_ready, START_SECONDS, every=0.2)
        return made

    def _start(self, name: str, words: list[str], port: int, more: dict[str, str]) -> Process:
        log = self.folder / f"{name}.log"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "PROMETHEUS_", "LMCACHE_"))}
        ours = {
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_VLLM_BIND_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        started = processes.start(name, [*self.command, *words], log, kept | ours | more)
        made = Process(name, started.popen, log, port)
        self.processes.append(made)
        return made

    def wait_for_workers(self, count: int) -> None:
        def seen() -> bool:
            found = json.loads(get(self.url + "/instances") or '{"instances": []}')["instances"]
            return len([i for i in found if i["endpoint"] == "generate"]) == count

        until(f"the frontend to see {count} worker(s)", seen, every=0.2)

        def answers() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):
                return self.ask([20, 21], 1) is not None
            return False

        until("the model to answer", answers, every=0.2)

    def ask(self, prompt: list[int], tokens: int = 12) -> Answer:
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["engine_data"]},
        }
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found = json.load(answer)
        details = found["usage"].get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        told = (found.get("nvext") or {}).get("engine_data") or {}
        return Answer(found["choices"][0]["text"], told.get("decode_cached_tokens", cached))

    def ask_all(self, prompts: list[list[int]]) -> list[Answer]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self.ask, prompts))

    def stop(self) -> list[str]:
        """Ask everybody to end, workers first; names who did not end well."""
        complaints = []
        for made in reversed(self.processes):
            complaints += made.stop()
            if (code := made.poll()) not in (0, 2, -signal.SIGKILL):  # 2 was told where it happened
                complaints.append(f"{made.name} ended with {code}")
        self.processes.clear()
        return complaints


# --- the steps ------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What the steps share: prompts, the reference's answers, and the stack that is up."""

    folder: Path
    model: str
    flags: list[str]
    gpu_memory: int
    wanted: list[Answer] = field(default_factory=list)
    repeats: int = 0
    stack: Stack | None = None
    complaints: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def deployment(self, name: str) -> Iterator[Stack]:
        """The one stack that is up; another that was kept is stopped first."""
        self.stop()
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        self.stack = Stack(folder, self.model, self.flags)
        self.stack.start_frontend()
        try:
            yield self.stack
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        stack, self.stack = self.stack, None
        if stack is not None:
            self.complaints += stack.stop()


def prompts(count: int = 50, longest: int = 1500, seed: int = 3) -> list[list[int]]:
    chance = random.Random(seed)
    lengths = [1, longest, *(chance.randrange(1, longest) for _ in range(count - 2))]
    return [[chance.randrange(10, 900) for _ in range(length)] for length in lengths]


def same(found: list[Answer], wanted: list[Answer]) -> int:
    return sum(a.text == b.text for a, b in zip(found, wanted, strict=True))


def can_load(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS[package]], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise NotPossible(f"{package}: {(done.stderr.strip().splitlines() or ['no message'])[-1][-300:]}")


def reference(bench: Bench) -> str:
    with bench.deployment("reference") as stack:
        stack.start_worker("worker")
        stack.wait_for_workers(1)
        began = time.monotonic()
        bench.wanted = stack.ask_all(prompts())
        seconds = time.monotonic() - began
        bench.repeats = same(stack.ask_all(prompts()), bench.wanted)
    bench.stop()
    return f"50 answers in {seconds:.1f} s; it repeats {bench.repeats} of 50 of its own"


def pair(bench: Bench, name: str, connectors: list[str], env: dict[str, str]) -> tuple[Stack, str]:
    """A prefill and a decode worker answer as the reference does, and nothing is computed twice."""
    if not bench.wanted:
        reference(bench)
    with bench.deployment(name) as stack:
        decode = stack.start_worker(
            "decode", "--connector", *connectors, "--disaggregation-mode", "decode", env=env
        )
        stack.start_worker("prefill", "--connector", *connectors, "--disaggregation-mode", "prefill", env=env)
        stack.wait_for_workers(2)
        began = time.monotonic()
        found = stack.ask_all(prompts())
        seconds = time.monotonic() - began
        equal = same(found, bench.wanted)
        again = [n for n, (a, p) in enumerate(zip(found, prompts(), strict=True)) if a.cached < len(p) - 1]
        lost = decode.metric("dynamo_component_kv_transfers_lost_total")
        fetched = decode.metric("vllm:external_prefix_cache_hits_total")
        told = (
            f"{equal} of 50 texts equal (one engine alone repeats {bench.repeats}), {len(again)} computed "
            f"again, {lost:.0f} transfers lost, {fetched:.0f} tokens fetched, {seconds:.1f} s"
        )
        # The last token of a prompt is always computed: its output is the answer's first.
        if equal < bench.repeats or again or lost:
            raise RuntimeError(told)
    return stack, told


def nixl(bench: Bench) -> str:
    can_load("nixl")
    return pair(bench, "nixl", ["nixl"], {})[1]


def lost_prefill(bench: Bench) -> str:
    if bench.stack is None or bench.stack.folder.name != "nixl":
        nixl(bench)
    stack = bench.stack
    assert stack is not None
    decode, prefill = stack.processes[1], stack.processes[2]
    prefill.kill()
    refused: list[str] = []

    def ask(n: int) -> bool:
        """Right, or refused with a status; a wrong text or a broken connection is neither."""
        try:
            return stack.ask(prompts()[n]).text == bench.wanted[n].text
        except urllib.error.HTTPError as exc:
            refused.append(f"{exc.code} {json.load(exc).get('message', '')}"[:80])
            return True

    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(ask, range(8)))
    if not all(right) and bench.repeats == 50:
        raise RuntimeError(f"{right.count(False)} of 8 answers are wrong")
    began = time.monotonic()

    def answers() -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            return stack.ask(prompts()[2]).text == bench.wanted[2].text
        return False

    until("the decode worker to answer alone", answers, 90, every=0.2)
    if decode.poll() is not None:
        raise RuntimeError(f"the decode worker ended: {decode.last_error()}")
    first = f" ({refused[0]})" if refused else ""
    return (
        f"{8 - len(refused)} of 8 right at once, {len(refused)} refused{first}; "
        f"all right after {time.monotonic() - began:.1f} s"
    )


def tier(bench: Bench, name: str, env: dict[str, str], *, flags: Sequence[str] = ()) -> tuple[Process, str]:
    """Ask for prompts that push each other out of a small engine cache, again and again."""
    can_load(name)
    small = ["--block-size", "16", "--num-gpu-blocks-override", "160", "--max-model-len", "2048"]
    every = prompts(10, 1400, seed=7)[1:]
    with bench.deployment(name) as stack:
        worker = stack.start_worker("worker", *(flags or ("--connector", name)), *small, env=env)
        stack.wait_for_workers(1)
        cold = [stack.ask(prompt) for prompt in every]
        stack.ask_all(every[1:])
        before = worker.metric("vllm:external_prefix_cache_hits_total")
        local = worker.metric("vllm:prefix_cache_hits_total")
        warm = [stack.ask(prompt) for prompt in every]
        found = worker.metric("vllm:external_prefix_cache_hits_total") - before
        own = worker.metric("vllm:prefix_cache_hits_total") - local
        equal = same(warm, cold)
        told = (
            f"the first of {len(every)} prompts, {len(every[0])} tokens: {cold[0].cached} cached when cold, "
            f"{warm[0].cached} when asked again; all of them: {found:.0f} tokens from {name}, {own:.0f} from "
            f"the engine, {equal} of {len(every)} texts equal"
        )
        if equal < len(every) or found < 1024 or warm[0].cached < 1024:
            raise RuntimeError(told)
    return worker, told


def offload(bench: Bench) -> str:
    """vLLM's own connector with our tiers; what is cleared does not come back."""
    worker, told = tier(bench, "offload", {}, flags=["--kv-offload-gb", "2", "--enable-sleep-mode"])
    assert bench.stack is not None
    prompt = prompts(10, 1400, seed=7)[1]
    wanted = bench.stack.ask(prompt).text
    for verbs in (("clear_kv_blocks",), ("sleep", "wake_up")):
        for verb in verbs:
            worker.tell(verb)
        bench.stack.wait_for_workers(1)
        found = bench.stack.ask(prompt)
        if found.cached or found.text != wanted:
            raise RuntimeError(f"{told}; after {' and '.join(verbs)} {found.cached} tokens were cached")
    bench.stop()
    return f"{told}; nothing is left of it after clear-kv and after sleep"


def offload_nixl(bench: Bench) -> str:
    can_load("nixl")
    _, told = pair(bench, "offload-nixl", ["offload", "nixl"], {"DYN_VLLM_KV_OFFLOAD_GB": "2"})
    bench.stop()
    return told


def lmcache(bench: Bench) -> str:
    worker, told = tier(bench, "lmcache", {"LMCACHE_MAX_LOCAL_CPU_SIZE": "2"})
    # LMCache writes its figures every ten seconds.
    name = "lmcache:num_hit_tokens_total"
    hits = until(f"{name} on /metrics", lambda: worker.metric(name), 40, every=0.2)
    bench.stop()
    return f"{told}; lmcache:num_hit_tokens_total {hits:.0f}"


def lmcache_nixl(bench: Bench) -> str:
    for package in ("lmcache", "nixl"):
        can_load(package)
    _, told = pair(bench, "lmcache-nixl", ["lmcache", "nixl"], {"LMCACHE_MAX_LOCAL_CPU_SIZE": "2"})
    bench.stop()
    return told


def lmcache_mp(bench: Bench) -> str:
    """LMCache as a server of its own beside the engine, over vLLM's flag: no --connector stands for it."""
    can_load("lmcache-mp")
    port, folder = free_port(), bench.folder / "lmcache-server"
    folder.mkdir(parents=True, exist_ok=True)
    words = ["server", "--port", str(port), "--http-port", str(free_port()), "--l1-size-gb", "2"]
    words += ["--eviction-policy", "LRU"]
    command = [sys.executable, "-m", "lmcache.cli.main", *words]
    env = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    server = processes.start("lmcache-server", command, folder / "server.log", env)
    told = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": told,
    }
    try:
        flags = ["--kv-transfer-config", json.dumps(config)]
        said = tier(bench, "lmcache-mp", {"LMCACHE_TRACK_USAGE": "false"}, flags=flags)[1]
        bench.stop()
        return said
    finally:
        bench.stop()
        server.kill()


def kvbm(bench: Bench) -> str:
    env = {"DYN_KVBM_CPU_CACHE_GB": "2", "DYN_KVBM_METRICS": "true"}
    worker, told = tier(bench, "kvbm", env)
    text = get(f"http://127.0.0.1:{worker.port}/metrics") or ""
    series = len([one for one in metrics.samples(text) if one.name.startswith("kvbm_")])
    heard = prove_events(bench)
    bench.stop()
    return f"{told}; {series} kvbm_ series; {heard}"


def prove_events(bench: Bench) -> str:
    """With KVBM the router hears vLLM's events only through KVBM, which adds its own."""
    assert bench.stack is not None
    command = [*COMMAND, "check", "--live", bench.stack.url, "--strict"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"no KV event reached the router: {(done.stdout + done.stderr).strip()[-400:]}")
    return "a merged KV event reached the router"


def kvbm_nixl(bench: Bench) -> str:
    for package in ("kvbm", "nixl"):
        can_load(package)
    _, told = pair(bench, "kvbm-nixl", ["kvbm", "nixl"], {"DYN_KVBM_CPU_CACHE_GB": "2"})
    bench.stop()
    return told


def clean(bench: Bench) -> str:
    bench.stop()
    if bench.complaints:
        raise RuntimeError("; ".join(bench.complaints))
    more = 0

    def freed() -> bool:
        nonlocal more
        more = gpu_memory() - bench.gpu_memory
        return more < 64

    with contextlib.suppress(TimeoutError):
        until("GPU memory to be free", freed, 20, every=0.2)
    if more >= 64:
        raise RuntimeError(f"{more} MiB of GPU memory more than before")
    return f"every process ended by itself, GPU memory {more:+d} MiB"


STEPS: dict[str, Callable[[Bench], str]] = {
    "reference": reference,
    "nixl": nixl,
    "lost-prefill": lost_prefill,
    "offload": offload,
    "offload-nixl": offload_nixl,
    "lmcache": lmcache,
    "lmcache-nixl": lmcache_nixl,
    "lmcache-mp": lmcache_mp,
    "kvbm": kvbm,
    "kvbm-nixl": kvbm_nixl,
    "clean": clean,
}


# --- running them ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"the step took more than {seconds:.0f} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(name: str, bench: Bench) -> Row:
    """One row of the table; a failure does not end the others."""
    began = time.monotonic()
    try:
        with at_most(STEP_SECONDS):
            said, result = STEPS[name](bench), "ok"
    except NotPossible as exc:
        said, result = str(exc), "not possible"
    except Exception as exc:
        said, result = f"{type(exc).__name__}: {exc}", "FAILED"
    row = Row(name, time.monotonic() - began, result, said)
    print(f"{row.step:13} {row.seconds:6.1f} s  {row.result:12} {row.said}", flush=True)
    return row


def query_gpu(what: str) -> int:
    listed = subprocess.run(
        ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(listed.stdout.split()[0])


def gpu_memory() -> int:
    return query_gpu("memory.used")


def engine_flags() -> list[str]:
    """Two engines share a card. float32 keeps greedy texts the same however requests are batched."""
    share = min(0.4, GIB_PER_ENGINE * 1024 / query_gpu("memory.total"))
    return ["--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", f"{share:.3f}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--model", help="folder of a model (default: the tiny demo model)")
    parser.add_argument("--logs", type=Path, help="keep the logs of every process in this folder")
    words, more = split(sys.argv[1:])
    options = parser.parse_args(words)
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"unknown step {unknown[0]!r}; choose from {', '.join(STEPS)}")
    chosen = [name for name in STEPS if name in options.steps or not options.steps]
    print(", ".join(f"{name} {version}" for name, version in versions().items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="dynamo-vllm-gpu-") as name:
        folder = options.logs or Path(name)
        bench = Bench(folder, model_folder(options.model, Path(name)), [*engine_flags(), *more], gpu_memory())
        try:
            rows = [run(step, bench) for step in chosen]
        finally:
            bench.stop()
    count = {result: sum(row.result == result for row in rows) for result in ("ok", "FAILED", "not possible")}
    print(f"{count['ok']} passed, {count['FAILED']} failed, {count['not possible']} not possible")
    return 1 if count["FAILED"] else 0


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "torch", "ai-dynamo-runtime", "nixl", "lmcache", "kvbm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and behind a bare -- what is vLLM's."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def model_folder(given: str | None, folder: Path) -> str:
    if given:
        return given
    from dynamo_vllm.models.tiny import make_tiny_model

    return str(make_tiny_model(folder / "tiny"))


if __name__ == "__main__":
    sys.exit(main())
