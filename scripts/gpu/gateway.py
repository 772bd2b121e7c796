"""What the gateway costs, and how fair it is: through it and without it, in one run and in turns.

    python scripts/gpu/gateway.py cost|fair --model fake|tiny|8b [--rounds 3] [--seconds 30]

`cost`: time to the first token with one request in flight, and CPU per streamed chunk of Envoy and the
control app with 16. `fair`: a tenant at 1 request per second alone, then beside one at 32. `fake` needs no
GPU and no model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from peers.settings import gpu_setting

from harness import gateway as gateways
from harness.gateway import Gateway
from harness.processes import COMMAND

FAKE = '{"token_ms": 20, "prefill_ms": 20, "max_num_seqs": 32, "max_num_queued_reqs": 10000}'
KEPT = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_NO_USAGE_STATS")
"""Settings of vLLM that this machine may need."""
FLOOD_RATE = 32
WARM_UP_SECONDS = 4


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "fair"))
    parser.add_argument("--model", choices=("fake", "tiny", "8b"), default="fake")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        with gateways.gateway(folder, *words(options.model, folder), seconds=300, **env) as made:
            measure = cost if options.what == "cost" else fair
            found = measure(made, folder, options)
    (options.out / f"gateway-{options.what}-{options.model}.json").write_text(json.dumps(found, indent=1))
    return 0


def words(model: str, folder: Path) -> tuple[str, ...]:
    if model == "fake":
        return ("--engine", "fake", "--fake-engine", FAKE)
    setting = gpu_setting(model, folder / "models", ())
    return ("--model", str(setting.model), *setting.flags)


def bench(
    made: Gateway, url: str, secret: str, folder: Path, name: str, *load: str
) -> subprocess.Popen[bytes]:
    """Start the load generator; its figures go to a file."""
    command = [*COMMAND, "bench", "load", url, "--api-key", secret, "--quiet", "--clients", "1", *load]
    command += ["--json", str(folder / f"{name}.json")]
    return subprocess.Popen(command, env=made.env)


def stage(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["stages"][0]
    return found


# --- cost -------------------------------------------------------------------------------------------------


def cost(made: Gateway, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    parts = {"envoy": made.envoy, "control": made.control, "frontend": made.frontend}
    urls = {"gateway": made.url, "direct": made.frontend_url}
    found = []
    for number in range(options.rounds):
        for name in (list(urls), list(urls)[::-1])[number % 2]:
            for flight, count, tokens in ((1, 60, 16), (16, 160, 128)):
                before = {part: used(process) for part, process in parts.items()}
                load = (
                    "--concurrency",
                    str(flight),
                    "--requests",
                    str(count),
                    "--output-tokens",
                    str(tokens),
                )
                bench(made, urls[name], made.key, folder, "cost", *load).wait()
                micros = {
                    part: round((used(process) - before[part]) / (count * tokens) * 1e6, 1)
                    for part, process in parts.items()
                }
                figures = stage(folder, "cost")
                ttft = round(figures["ttft_ms"]["p50"], 2)
                row = {"round": number, "way": name, "flight": flight, "ttft_ms": ttft, "cpu_us": micros}
                print(row, flush=True)
                found.append(row)
    return found


def used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# --- fairness ---------------------------------------------------------------------------------------------


def fair(made: Gateway, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    flood = made.create_key("flood", "--tenant", "flood")
    quiet = made.create_key("quiet", "--tenant", "quiet")
    # Tokens that are whole characters: the frontend holds back others, and their answers seem late.
    shape = ("--output-tokens", "64", "--vocab", "600:800", "--arrivals", "even", "--timeout", "120")
    found = []

    def ask(secret: str, rate: int, seconds: int, name: str) -> subprocess.Popen[bytes]:
        load = ("--rate", str(rate), "--seconds", str(seconds), *shape)
        return bench(made, made.url, secret, folder, name, *load)

    def note(name: str, number: int) -> None:
        figures = stage(folder, name)
        times = {key: round(figures["ttft_ms"][key], 1) for key in ("p50", "p90", "p99", "max")}
        rate = figures["tokens"]["output_per_second"]
        row = {"round": number, "who": name, "requests": figures["requests"], "ttft_ms": times, "tok_s": rate}
        print(row, flush=True)
        found.append(row)

    for number in range(options.rounds):
        ask(quiet, 1, options.seconds, "alone").wait()
        note("alone", number)
        flooding = ask(flood, FLOOD_RATE, options.seconds + 2 * WARM_UP_SECONDS, "flood")
        try:
            flooding.wait(WARM_UP_SECONDS)
        except subprocess.TimeoutExpired:
            ask(quiet, 1, options.seconds, "beside").wait()
        note("beside", number)
        flooding.wait()
        note("flood", number)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
