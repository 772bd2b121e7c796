"""Pictures in one engine, and with the encoder in a worker of its own, on one GPU; exits 1 when one fails.

    python scripts/gpu/multimodal.py [--dtype bfloat16] [--tiny] [--logs FOLDER] [-- vLLM flags …]

Makes a Qwen2.5-VL with the vision encoder of the real 3B model and half of its language layers, all with
random weights. What is checked, for one engine and for E + PD:
  - answers about one and two pictures of 1000 by 1000 pixels, asked one by one, are word for word the same
  - 8 users at once get answers about their own pictures; with --dtype float32 word for word. In bfloat16
    a batch rounds differently, so that an answer may leave its own after some words, but not for another's
  - the engine that answers never runs its encoder; a picture that comes again is not encoded again
and the time of each stage of a request with one new picture is shown.

The model's processor needs torchvision. --tiny takes a tiny model and small pictures, for a machine without
a GPU.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disaggregation import MODEL_NAME, Process, Stack, split
from operate import Checks, is_anothers, used_gib
from timed import ASK, ENCODE, FETCH, PROCESS, READ, TIMES

HERE = Path(__file__).parent
TIMED = [sys.executable, str(HERE / "timed.py")]
USERS, TIMED_REQUESTS, MAX_TOKENS = 8, 8, 16
LONG = "ba be bi bo " * 12
PREFILL = "vllm:request_prefill_time_seconds_sum"


@dataclass(frozen=True)
class Size:
    """Of a model and of the pictures it is shown."""

    text: dict[str, Any]
    eye: dict[str, Any]
    side: int
    max_pixels: int


LARGE = Size(
    text={
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    eye={
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "window_size": 112,
    },
    side=1000,
    max_pixels=2048 * 28 * 28,
)
TINY = Size(text={}, eye={}, side=112, max_pixels=256 * 256)


# --- the model ------------------------------------------------------------------------------------------


def make_model(folder: Path, size: Size, dtype: str) -> tuple[Path, float]:
    """The tiny model's words and processors with layers of this size; also how many billion weights."""
    import torch
    from safetensors.torch import save_file

    sys.path.append(str(HERE.parent))
    from tiny_models.vision import make_tiny_vision_model

    make_tiny_vision_model(folder, "qwen2.5-vl")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= size.text
    config["vision_config"] |= size.eye
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        told = json.loads((folder / name).read_text())
        told["max_pixels"] = told["size"]["longest_edge"] = size.max_pixels
        (folder / name).write_text(json.dumps(told))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    weights = {}
    for name, shape in shapes(config["text_config"], config["vision_config"]):
        if len(shape) == 1:
            is_norm = "norm" in name or "ln_q" in name
            made = torch.full(shape, float(is_norm), device=device)
        else:
            spread = 0.5 if "embed_tokens" in name else 1.2 / (made_from(shape) ** 0.5)
            made = torch.randn(*shape, generator=generator, device=device) * spread
        weights[name] = made.to(getattr(torch, dtype)).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder, sum(w.numel() for w in weights.values()) / 1e9


def made_from(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[1:]:
        count *= size
    return count


def shapes(text: dict[str, Any], eye: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, between, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    head = hidden // text["num_attention_heads"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for index in range(text["num_hidden_layers"]):
        at = f"model.layers.{index}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name, heads in (("q", "num_attention_heads"), *((n, "num_key_value_heads") for n in "kv")):
            yield from linear(f"{at}.self_attn.{name}_proj", text[heads] * head, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}.mlp.gate_proj.weight", (between, hidden)
        yield f"{at}.mlp.up_proj.weight", (between, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, between)
    width, between, merged = eye["hidden_size"], eye["intermediate_size"], 4 * eye["hidden_size"]
    yield "visual.patch_embed.proj.weight", (width, 3, 2, 14, 14)
    for index in range(eye["depth"]):
        at = f"visual.blocks.{index}"
        yield f"{at}.norm1.weight", (width,)
        yield f"{at}.norm2.weight", (width,)
        yield from linear(f"{at}.attn.qkv", 3 * width, width)
        yield from linear(f"{at}.attn.proj", width, width)
        yield from linear(f"{at}.mlp.gate_proj", between, width)
        yield from linear(f"{at}.mlp.up_proj", between, width)
        yield from linear(f"{at}.mlp.down_proj", width, between)
    yield "visual.merger.ln_q.weight", (width,)
    yield from linear("visual.merger.mlp.0", merged, merged)
    yield from linear("visual.merger.mlp.2", hidden, merged)


def linear(name: str, out: int, into: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


# --- pictures and chats ---------------------------------------------------------------------------------


def picture(seed: int, side: int) -> dict[str, Any]:
    """Large patches of colour: noise would look the same in every picture to a model that takes averages."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(stack: Stack, pictures: list[dict[str, Any]], words: str = LONG) -> tuple[str, float]:
    """The answer, and after how many seconds its first token came."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": words}]}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        stack.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, said = time.perf_counter(), 0.0, []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            told = json.loads(line[6:])
            if "choices" not in told:
                raise RuntimeError(f"the stream says {told}")
            said += [choice["delta"].get("content") or "" for choice in told["choices"]]
    return "".join(said), first


# --- one layout -----------------------------------------------------------------------------------------


@dataclass
class Layout:
    """A stack that is up: the worker that answers, and the one that encodes; they may be the same."""

    stack: Stack
    answering: Process
    encoding: Process

    def times_file(self, process: Process) -> Path:
        return self.stack.folder / f"{process.name}.times"

    def runs(self, process: Process) -> int:
        """How often its engine ran the vision encoder; some at the start, to measure memory."""
        return len(self.times(process)[ENCODE])

    def times(self, process: Process) -> dict[str, list[float]]:
        found = defaultdict(list)
        for line in self.times_file(process).read_text().splitlines():
            stage, seconds = line.split()
            found[stage].append(float(seconds))
        return found


@dataclass
class Seen:
    """What one layout said, by case, and how long its stages took, in milliseconds."""

    answers: dict[str, str]
    stages: dict[str, float]


def start(name: str, folder: Path, model: Path, flags: list[str]) -> Layout:
    """One engine, or first the encoder and then the engine that asks it."""
    (folder / name).mkdir(parents=True)
    stack = Stack(folder / name, str(model), flags, command=TIMED)
    stack.start_frontend()
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]

    def worker(role: str, *more: str) -> Process:
        times = stack.folder / f"{role}.times"
        times.touch()
        env = {TIMES: str(times), "PYTHONPATH": os.pathsep.join(paths)}
        return stack.start_worker(role, *more, env=env)

    try:
        if name == "one engine":
            answering = encoding = worker("worker")
        else:
            shared = ["--ec-storage-path", str(stack.folder / "encoded")]
            encoding = worker("encoder", "--disaggregation-mode", "encode", *shared)
            answering = worker("worker", "--route-to-encoder", *shared)
        stack.wait_for_workers(1 if answering is encoding else 2)
    except BaseException:
        show_logs(stack)
        stack.stop()
        raise
    return Layout(stack, answering, encoding)


def ask_everything(layout: Layout, side: int, check: Checks, name: str) -> Seen:
    stack = layout.stack
    before = layout.runs(layout.answering), layout.runs(layout.encoding)
    chat(stack, [picture(1, side)])  # the first request of an engine also compiles
    warm = layout.runs(layout.encoding)
    check(warm > before[1], f"{name}: the encoder ran for a new picture")
    answers = {"one picture": chat(stack, [picture(2, side)])[0]}
    answers["two pictures"] = chat(stack, [picture(3, side), picture(4, side)])[0]
    for user in range(USERS):
        answers[f"user {user}"] = chat(stack, [picture(100 + user, side)])[0]
    seen = layout.runs(layout.encoding)
    last = picture(100 + USERS - 1, side)  # an engine keeps few
    chat(stack, [last], "bo bi be ba " * 12)
    again = layout.runs(layout.encoding) - seen
    check(again == 0, f"{name}: a picture that comes again with other words: encoded {again} times more")
    stages = time_stages(layout, side)
    with ThreadPoolExecutor(USERS) as pool:
        asked = [[picture(200 + user, side)] for user in range(USERS)]
        found = [text for text, _ in pool.map(lambda pictures: chat(stack, pictures), asked)]
    answers |= {f"at once {user}": text for user, text in enumerate(found)}
    ran = layout.runs(layout.answering) - before[0]
    if layout.answering is not layout.encoding:
        lost = layout.answering.metric("dynamo_component_encodings_lost_total")
        check(
            ran == 0 and lost == 0,
            f"{name}: the worker that answers ran its encoder {ran} times; {lost:.0f} hand-offs lost",
        )
    return Seen(answers, stages)


def time_stages(layout: Layout, side: int) -> dict[str, float]:
    """Medians over requests with one new picture each, one at a time."""
    found = defaultdict(list)
    for number in range(TIMED_REQUESTS):
        before = {p.name: Counter({k: len(v) for k, v in layout.times(p).items()}) for p in both(layout)}
        prefill = layout.answering.metric(PREFILL)
        _, first = chat(layout.stack, [picture(300 + number, side)])
        took: dict[str, float] = defaultdict(float)
        for process in both(layout):
            for stage, times in layout.times(process).items():
                is_elsewhere = layout.encoding is not layout.answering and process is layout.answering
                key = "take over" if is_elsewhere and stage == PROCESS else stage
                took[key] += sum(times[before[process.name][stage] :])
        engine = layout.answering.metric(PREFILL) - prefill
        handed = took[ASK] + took[READ] - sum(took[s] for s in (FETCH, PROCESS, ENCODE)) if took[ASK] else 0
        inside = 0 if took[ASK] else took[ENCODE]
        stages = {
            "fetch and decode": took[FETCH],
            "process": took[PROCESS],
            "encode": took[ENCODE],
            "hand-off": handed + took["take over"],
            "prefill": engine - inside,
        }
        stages["the rest"] = first - sum(stages.values())
        stages["to the first token"] = first
        for stage, seconds in stages.items():
            found[stage].append(seconds * 1000)
    return {stage: statistics.median(times) for stage, times in found.items()}


def both(layout: Layout) -> list[Process]:
    return list({p.name: p for p in (layout.answering, layout.encoding)}.values())


def show_logs(stack: Stack) -> None:
    for process in stack.processes:
        print(f"--- {process.name}", "\n".join(process.log.read_text(errors="replace").splitlines()[-60:]))


# --- both, compared ---------------------------------------------------------------------------------------


def compare(one: Seen, apart: Seen, is_exact: bool, check: Checks) -> None:
    alone = [case for case in one.answers if not case.startswith("at once")]
    check(len({one.answers[c] for c in alone}) == len(alone), f"{len(alone)} pictures, as many answers")
    equal = sum(one.answers[case] == apart.answers[case] for case in alone)
    check(equal == len(alone), f"asked one by one: {equal} of {len(alone)} answers word for word the same")
    users = [case for case in one.answers if case.startswith("at once")]
    equal = sum(one.answers[case] == apart.answers[case] for case in users)
    wanted = {case: [one.answers[case]] for case in users}
    others = sum(is_anothers(apart.answers[case], case, 0, wanted) for case in users)
    check(
        others == 0 and (equal == len(users) or not is_exact),
        f"{len(users)} users at once: {equal} of {len(users)} word for word the same, {others} another's",
    )


def run(options: argparse.Namespace, folder: Path, check: Checks) -> None:
    size = TINY if options.tiny else LARGE
    began = time.monotonic()
    model, billions = make_model(folder / "model", size, options.dtype)
    check(True, f"a model of {billions:.2f} billion weights in {time.monotonic() - began:.0f} s")
    flags = [
        *("--dtype", options.dtype, "--enable-multimodal", "--worker-extension-cls", "timed_encoder.Timed"),
        *("--max-model-len", "2048" if options.tiny else "8192"),
        *("--limit-mm-per-prompt", '{"image": 2, "video": 0}', "--enforce-eager"),
        *([] if options.tiny else ["--gpu-memory-utilization", "0.3"]),
        *options.vllm,
    ]
    seen: dict[str, Seen] = {}
    before = 0 if options.tiny else used_gib()
    for name in ("one engine", "E + PD"):
        began = time.monotonic()
        try:
            layout = start(name, folder, model, flags)
        except Exception as exc:
            check(False, f"{name}: {type(exc).__name__}: {exc}")
            continue
        try:
            check(True, f"{name}: ready after {time.monotonic() - began:.0f} s")
            seen[name] = ask_everything(layout, size.side, check, name)
        except Exception as exc:
            check(False, f"{name}: {type(exc).__name__}: {exc}")
            show_logs(layout.stack)
        complaints = layout.stack.stop()
        check(not complaints, f"{name} ended: {'; '.join(complaints) or 'nothing is left'}")
    if len(seen) == 2:
        compare(seen["one engine"], seen["E + PD"], options.dtype == "float32", check)
        print(f"\n{'one new picture, ms (median)':30}" + "".join(f"{name:>12}" for name in seen))
        for stage in seen["E + PD"].stages:
            print(f"{stage:30}" + "".join(f"{found.stages[stage]:12.1f}" for found in seen.values()))
    if not options.tiny:
        check(used_gib() - before < 1, f"{used_gib() - before:.1f} GiB still in use")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs and the model here")
    words, more = split(sys.argv[1:])
    options = parser.parse_args(words)
    options.dtype = options.dtype or ("float32" if options.tiny else "bfloat16")
    options.vllm = more
    check = Checks()
    with tempfile.TemporaryDirectory(prefix="dynamo-vllm-gpu-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(options, folder, check)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
