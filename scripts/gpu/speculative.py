"""Speculative decoding on one GPU: texts with and without it; exits 1 if one differs or no draft is right.

    python scripts/gpu/speculative.py [METHOD …] [--model FOLDER] [--logs FOLDER] [-- vLLM flags …]

The methods are ngram, draft_model, eagle, eagle3 and mtp; none named runs all of them. Drafts are made of the
weights of a small model, so that some are right and most are not. Each method answers twice, with tokens sent
directly from the engine's output handler and over vLLM's own path. The texts are greedy, in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from disaggregation import Stack, engine_flags, model_folder, prompts, split, versions

from cpu.guessing import make

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
WAYS = ("--direct-egress", "--no-direct-egress")
PROMPTS, TOKENS, DRAFTED = 16, 100, 3
SERIES = "vllm:spec_decode_num_{}_tokens_total"


@dataclass
class Bench:
    folder: Path
    model: str
    flags: list[str]
    wanted: dict[str, list[str]] = field(default_factory=dict)
    """Texts without speculation, by model."""

    def answers(self, name: str, model: str, *flags: str) -> tuple[list[str], dict[str, float]]:
        """The texts of one engine, and how many tokens were drafted and accepted."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        stack = Stack(folder, model, self.flags)
        try:
            stack.start_frontend()
            worker = stack.start_worker("worker", *flags)
            stack.wait_for_workers(1)
            texts = [stack.ask(prompt, TOKENS).text for prompt in prompts(PROMPTS, 700)]
            return texts, {what: worker.metric(SERIES.format(what)) for what in ("accepted", "draft")}
        finally:
            stack.stop()

    def without(self, model: str) -> list[str]:
        if model not in self.wanted:
            self.wanted[model] = self.answers(f"plain-{len(self.wanted)}", model)[0]
        return self.wanted[model]

    def compare(self, method: str, way: str) -> str:
        model, config = self.drafting(method)
        flags = (way, "--speculative-config", json.dumps(config))
        found, tokens = self.answers(f"{method}{way[1:]}", model, *flags)
        equal = sum(one == other for one, other in zip(found, self.without(model), strict=True))
        accepted = f"{tokens['accepted']:.0f} of {tokens['draft']:.0f} drafted tokens accepted"
        told = f"{equal} of {PROMPTS} texts equal, {accepted}"
        if equal < PROMPTS or not tokens["accepted"]:
            raise RuntimeError(told)
        return told

    def drafting(self, method: str) -> tuple[str, dict[str, object]]:
        """The model that answers, and what drafts for it."""
        if method == "ngram":
            looked_up = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            return self.model, {"method": method, "num_speculative_tokens": DRAFTED, **looked_up}
        folder = self.folder / f"model-{method}"
        made = str(folder if folder.exists() else make(method, folder, Path(self.model)))
        if method == "mtp":
            return made, {"method": method, "num_speculative_tokens": 1}
        return self.model, {"method": method, "model": made, "num_speculative_tokens": DRAFTED}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--model", help="folder of a small model of Qwen3's shape (default: the tiny one)")
    parser.add_argument("--logs", type=Path, help="keep the logs of every process in this folder")
    words, more = split(sys.argv[1:])
    options = parser.parse_args(words)
    if unknown := [name for name in options.methods if name not in METHODS]:
        parser.error(f"unknown method {unknown[0]!r}; choose from {', '.join(METHODS)}")
    print(", ".join(f"{name} {version}" for name, version in versions().items()), flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="dynamo-vllm-gpu-") as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, model_folder(options.model, Path(name)), [*engine_flags(), *more])
        for method in options.methods or METHODS:
            for way in WAYS:
                began = time.monotonic()
                try:
                    told, result = bench.compare(method, way), "ok"
                except Exception as exc:
                    told, result, failed = f"{type(exc).__name__}: {exc}", "FAILED", failed + 1
                took = time.monotonic() - began
                print(f"{method:12} {way:18} {took:6.1f} s  {result:6} {told}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
