"""Provides the answers of a frontend and of bare vLLM for tests of LoRA adapters."""

from __future__ import annotations

import random
from pathlib import Path

import httpx

from cpu.children import Children
from cpu.completions import Completion, complete
from harness.stack import Stack, Worker
from harness.waiting import until

LORA = ("--enable-lora", "--max-loras", "2")
PROMPTS = 6
Expected = dict[tuple[str, int], str]
"""Maps a model and the number of a prompt to the text."""


def prompt(number: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(10, 900) for _ in range((1, 7, 32, 33, 64, 100)[number % PROMPTS])]


def bare_answers(children: Children, model: Path, adapters: dict[str, Path]) -> Expected:
    """Returns the answers of bare vLLM, one request at a time."""
    names = ["tiny", *adapters]
    keys = [(name, number) for name in names for number in range(PROMPTS)]
    cases = [
        {
            "prompt": prompt(number),
            "params": {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True},
            "adapter": None if name == "tiny" else (name, names.index(name), str(adapters[name])),
        }
        for name, number in keys
    ]
    answers = children.ask("bare:completions", str(model), cases)
    return dict(zip(keys, (choices[0]["text"] for choices in answers), strict=True))


def ask(made: Stack, model: str, number: int) -> Completion:
    return complete(made, prompt(number), 16, model=model)


def text(made: Stack, model: str, number: int) -> str:
    return ask(made, model, number).text


def load(worker: Worker, name: str, uri: Path | str) -> httpx.Response:
    return worker.admin("load_lora", lora_name=name, source={"uri": str(uri)})


def load_all(made: Stack, adapters: dict[str, Path], *names: str) -> None:
    """Loads these on every worker, and waits until clients may ask them."""
    for worker in made.workers:
        for name in names:
            answer = load(worker, name, adapters[name])
            assert answer.status_code == 200, answer.text
    until("the adapters", lambda: sorted(made.models()) == sorted(["tiny", *names]))


def unload_all(made: Stack) -> None:
    for worker in made.workers:
        for name in loaded(worker):
            assert worker.admin("unload_lora", lora_name=name).status_code == 200
    until("only the base model", lambda: made.models() == ["tiny"])


def loaded(worker: Worker) -> list[str]:
    entries = httpx.get(f"{worker.system_url}/v1/loras", timeout=30).json()["loras"]
    return [entry["name"] for entry in entries if entry["state"] == "loaded"]
