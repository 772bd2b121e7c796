"""Provides the answers of a frontend and of bare vLLM for tests of LoRA adapters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx

from harness.stack import Stack, Worker, environment
from harness.warm import FORKED, Zygote

LORA = ("--enable-lora", "--max-loras", "2")
PROMPTS = 6
Expected = dict[tuple[str, int], str]
"""Maps a model and the number of a prompt to the text."""


def prompt(number: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(10, 900) for _ in range((1, 7, 32, 33, 64, 100)[number % PROMPTS])]


def bare_answers(warm: Zygote, model: Path, adapters: dict[str, Path], folder: Path) -> Expected:
    """Returns the answers of bare vLLM, one request at a time."""
    names = ["tiny", *adapters]
    cases = [
        {
            "prompt": prompt(number),
            "params": {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True},
            "adapter": None if name == "tiny" else [name, names.index(name), str(adapters[name])],
        }
        for name in names
        for number in range(PROMPTS)
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    reference = warm.fork(
        "cpu.reference:run",
        [str(model), str(folder / "cases.json"), str(folder / "out.json")],
        environment(folder, **FORKED),
        folder / "log",
    )
    assert reference.wait(300) == 0, (folder / "log").read_text()[-3000:]
    texts = [choices[0]["text"] for choices in json.loads((folder / "out.json").read_text())]
    return dict(zip([(name, number) for name in names for number in range(PROMPTS)], texts, strict=True))


def ask(made: Stack, model: str, number: int) -> Any:
    return made.openai.completions.create(
        model=model,
        prompt=prompt(number),
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True, "nvext": {"extra_fields": ["worker_id", "engine_data"]}},
    )


def text(made: Stack, model: str, number: int) -> str:
    return str(ask(made, model, number).choices[0].text)


def who(answer: Any) -> int:
    return int(answer.model_extra["nvext"]["worker_id"]["decode_worker_id"])


def load(worker: Worker, name: str, uri: Path | str) -> httpx.Response:
    return worker.admin("load_lora", lora_name=name, source={"uri": str(uri)})


def loaded(worker: Worker) -> list[str]:
    found = httpx.get(f"http://127.0.0.1:{worker.system_port}/v1/loras", timeout=30).json()["loras"]
    return [entry["name"] for entry in found if entry["state"] == "loaded"]
