"""Sleep, wake, adapters and prompt embeddings of one worker on a GPU; exits 1 when something is wrong.

    python scripts/gpu/operate.py [--cycles 20] [--model FOLDER] [--logs FOLDER] [-- vLLM flags …]

Without --model it makes one of 1.3 billion random weights: something to put to sleep. What is checked:
  - asleep, at least 90 % of the engine's memory pool is free; level 1 and level 2, with the times
  - awake, the base model answers word for word as before, and two adapters as themselves, alone and mixed
  - so many cycles of sleep and wake
  - an embedded prompt gives what its tokens give
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from disaggregation import MODEL_NAME, Process, Stack

from harness.adapters import make_adapter
from harness.waiting import until

LEAST_FREED = 0.9
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 24, 2048, 6144, 16, 8, 128


def make_model(folder: Path) -> Path:
    """The tiny model's words with real layers: 1.3 billion weights in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from dynamo_vllm.models.tiny import make_tiny_model

    make_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | shape))
    generator = torch.Generator("cuda").manual_seed(1)

    def matrix(rows: int, columns: int, spread: float = 0.03) -> Any:
        made = torch.randn(rows, columns, generator=generator, device="cuda") * spread
        return made.to(torch.bfloat16).cpu()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], HIDDEN, 0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(config["vocab_size"], HIDDEN),
    }
    for index in range(LAYERS):
        layer = {
            "input_layernorm": ones.clone(),
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": torch.ones(HEAD_DIM, dtype=torch.bfloat16),
            "self_attn.k_norm": torch.ones(HEAD_DIM, dtype=torch.bfloat16),
            "post_attention_layernorm": ones.clone(),
            "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
        }
        weights |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.cuda.empty_cache()
    return folder


def used_gib() -> float:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def admin(worker: Process, verb: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{worker.port}/engine/{verb}", json.dumps(body).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as exc:
        raise RuntimeError(f"{verb}: {exc.code} {exc.read().decode()}") from None
    return found


def complete(stack: Stack, **body: Any) -> str:
    given = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
    request = urllib.request.Request(
        stack.url + "/v1/completions", json.dumps(given).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def prompts(count: int = 10) -> list[list[int]]:
    chance = random.Random(2)
    return [[chance.randrange(10, 900) for _ in range(chance.randrange(1, 400))] for _ in range(count)]


def alone(stack: Stack) -> dict[str, list[str]]:
    """One request at a time: no batch changes a rounding."""
    return {
        name: [complete(stack, model=name, prompt=prompt) for prompt in prompts()]
        for name in (MODEL_NAME, "a", "b")
    }


def mixed(stack: Stack, wanted: dict[str, list[str]], requests: int = 120) -> tuple[int, int]:
    """How many of so many at once are as they were alone, and how many begin like another model's answer."""
    chance = random.Random(4)
    asked = [(chance.choice(list(wanted)), chance.randrange(len(prompts()))) for _ in range(requests)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: complete(stack, model=case[0], prompt=prompts()[case[1]]), asked))
    pairs = list(zip(found, asked, strict=True))
    same = sum(text == wanted[name][at] for text, (name, at) in pairs)
    return same, sum(is_anothers(text, name, at, wanted) for text, (name, at) in pairs)


def is_anothers(text: str, name: str, at: int, wanted: dict[str, list[str]]) -> bool:
    """Batches round differently, so an answer may leave its own after some words; not for another's."""
    begins = {other: shared(text, texts[at]) for other, texts in wanted.items()}
    return max(begins, key=lambda other: (begins[other], other == name)) != name


def shared(one: str, other: str) -> int:
    """Characters until they differ."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def embedded(stack: Stack, model: Path) -> int:
    """How many prompts give the same as embeddings."""
    import torch
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    same = 0
    for prompt in prompts():
        buffer = io.BytesIO()
        torch.save(table[prompt].clone(), buffer)
        rows = base64.b64encode(buffer.getvalue()).decode()
        tokens = complete(stack, model=MODEL_NAME, prompt=prompt)
        same += complete(stack, model=MODEL_NAME, prompt="", prompt_embeds=rows) == tokens  # not cached: rows
    return same


def compare(found: dict[str, list[str]], wanted: dict[str, list[str]]) -> tuple[bool, str]:
    """The base model word for word. vLLM's LoRA kernels add in no fixed order, so that an adapter's answers
    do not even repeat themselves: of those none may be another's."""
    same = {name: sum(map(str.__eq__, found[name], wanted[name])) for name in wanted}
    others = sum(
        is_anothers(text, name, at, wanted) for name, texts in found.items() for at, text in enumerate(texts)
    )
    count = len(prompts())
    said = ", ".join(f"{name} {number} of {count}" for name, number in same.items())
    return same[MODEL_NAME] == count and others == 0, f"{said} word for word, {others} another's"


class Checks:
    """What was seen, line by line."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def __call__(self, is_right: bool, said: str) -> None:
        print(f"{'ok' if is_right else 'FAILED':7}{said}", flush=True)
        if not is_right:
            self.failed.append(said)


def sleep_and_wake(
    stack: Stack, worker: Process, wanted: dict[str, list[str]], before: float, check: Checks
) -> None:
    for level in (1, 2):
        ready = used_gib()
        slept = admin(worker, "sleep", level=level, drain_seconds=10)
        asleep = used_gib()
        share = (ready - asleep) / (ready - before)
        freed = slept["freed_bytes"] / 2**30
        check(
            share >= LEAST_FREED,
            f"level {level}: {freed:.1f} GiB freed by the worker's count, {ready - asleep:.1f} of "
            f"{ready - before:.1f} GiB by the driver's ({share:.1%}); asleep after {slept['seconds']:.2f} s "
            "with 1 s in which frontends hear of it",
        )
        woken = admin(worker, "wake_up")
        until("the model to answer", lambda: answers(stack), 30, every=0.2)
        check(True, f"level {level}: awake after {woken['seconds']:.2f} s")
        is_right, said = compare(alone(stack), wanted)
        check(is_right, f"level {level}: {said}")


def answers(stack: Stack) -> bool:
    try:
        return bool(complete(stack, model="b", prompt=[20], max_tokens=1))
    except urllib.error.HTTPError:
        return False


def cycles(stack: Stack, worker: Process, count: int, check: Checks) -> None:
    times = []
    for _ in range(count):
        slept, woken = admin(worker, "sleep", level=1), admin(worker, "wake_up")
        times.append((slept["seconds"], woken["seconds"]))
    until("the model to answer", lambda: answers(stack), 30, every=0.2)
    asleep, awake = zip(*times, strict=True)
    check(
        True,
        f"{count} cycles of level 1: sleep {min(asleep):.2f} to {max(asleep):.2f} s, "
        f"wake {min(awake):.2f} to {max(awake):.2f} s",
    )


def run(options: argparse.Namespace, folder: Path, check: Checks) -> None:
    model = Path(options.model) if options.model else make_model(folder / "model")
    for seed, name in enumerate("ab", 1):
        make_adapter(folder / name, model, seed=seed, scale=0.05)
    before = used_gib()
    # vLLM's LoRA kernels take no float32.
    flags = [
        "--dtype",
        "float16",
        "--enable-sleep-mode",
        "--enable-lora",
        "--max-loras",
        "2",
        "--enable-prompt-embeds",
    ]
    stack = Stack(folder, str(model), [*flags, *options.vllm])
    try:
        stack.start_frontend()
        began = time.monotonic()
        worker = stack.start_worker("worker")
        stack.wait_for_workers(1)
        check(True, f"ready after {time.monotonic() - began:.0f} s, {used_gib() - before:.1f} GiB in use")
        for name in "ab":
            loaded = admin(worker, "load_lora", lora_name=name, source={"uri": str(folder / name)})
            check(
                loaded["rank"] == 8, f"adapter {name}: {loaded['bytes']} bytes in {loaded['seconds']:.2f} s"
            )
        until("the adapters to be listed", lambda: answers(stack), 30, every=0.2)
        wanted = alone(stack)
        check(len({texts[0] for texts in wanted.values()}) == 3, "base model, a and b answer differently")
        admin(worker, "clear_kv_blocks")
        check(*compare(alone(stack), wanted))
        same, others = mixed(stack, wanted)
        check(
            others == 0, f"{same} of 120 mixed at concurrency 8 as alone to the last word, {others} another's"
        )
        admin(worker, "clear_kv_blocks")
        same = embedded(stack, model)
        check(same == len(prompts()), f"{same} of {len(prompts())} embedded prompts are as their tokens")
        sleep_and_wake(stack, worker, wanted, before, check)
        cycles(stack, worker, options.cycles, check)
        is_right, said = compare(alone(stack), wanted)
        check(is_right, f"after the cycles: {said}")
        admin(worker, "unload_lora", lora_name="a")
        admin(worker, "clear_kv_blocks")
        check(True, f"status: {json.dumps(admin(worker, 'status'))}")
    except Exception as exc:
        check(False, f"{type(exc).__name__}: {exc}")
        for process in stack.processes:
            print(
                f"--- {process.name}", "\n".join(process.log.read_text(errors="replace").splitlines()[-60:])
            )
    complaints = stack.stop()
    check(not complaints, f"ended: {'; '.join(complaints) or 'nothing is left'}")
    check(used_gib() - before < 1, f"{used_gib() - before:.1f} GiB still in use")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--logs", metavar="FOLDER")
    parser.add_argument("vllm", nargs="*", metavar="FLAG", help="flags for vLLM, after --")
    options = parser.parse_args()
    check = Checks()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.logs or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(options, folder, check)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
