"""Tests our engine with vLLM-Omni's own types; skipped if vLLM-Omni is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import omni

if omni.lacks("vllm-omni"):
    omni.skip()


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    program = str(Path(__file__).with_name("omni_probe.py"))
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


PNG = ["image", "image/png", "89504e47"]
NOTHING = "EngineRequestFailed: the pipeline ended without generating anything"
UNFINISHED = "EngineRequestFailed: the pipeline ended without finishing its text"
FILM = ["video/mp4", 16, 18, 8.0, 0, 3, True]
OUTCOMES: dict[str, Any] = {
    "outcomes": {
        "picture": [[None, "stop", True, [PNG, PNG]]],
        "text, then picture": [["a cat in the sun", None, False, []], [None, "stop", True, [PNG]]],
        "nothing": NOTHING,
        "no output at all": NOTHING,
        "error": "EngineRequestFailed: no memory",
        "abort": [[None, "abort", True, []]],
        "sound": [[None, "stop", True, [["audio", "audio/wav", "52494646"]]]],
    },
    "written": {
        "whole": [["a", None, False], ["b", "stop", True]],
        "empty": UNFINISHED,
        "cut": UNFINISHED,
        "salted": {"prompt_token_ids": [1, 2], "cache_salt": "me"},
    },
    # A dead stage is a dead engine whoever meets it first, and is let go.
    "dead": dict.fromkeys(("job", "health check"), ["EngineDead", "left behind"]),
    "goodbye": True,
    "aborted": [[["abort", True, 0]], ["j"]],
    # A long drawing is no hang, but a silent canary is.
    "silence": {"client": True, "canary-1": False, "warm-up": False},
    "prompt": {"prompt": "a cat", "negative_prompt": "dog"},
    "picture": {
        "seed": 7,
        "num_outputs_per_prompt": 2,
        "width": 8,
        "height": 16,
        "num_inference_steps": 3,
        "guidance_scale": 2.0,
    },
    "text": ["FINAL_ONLY", 7],
    "sound": [1, 2, 16000, 480],
    "stereo": [2, 100, 0, 32767],
    # The diffusers adapter never compiles and refuses the flag; a text stage before it gets the flag.
    "eager": [{}, {"stage_0_enforce_eager": True}],
    "length": [5, 8],
    "filmed": {
        "pictures": FILM,
        "bare pictures": FILM,
        "array": ["video/mp4", 16, 18, 8.0, 1, 3, True],  # with sound
        "tensor": FILM,
        "below zero": FILM,
        "odd": FILM,
    },
    "no picture": "the pipeline generated list, not an image",
    # A plain model becomes a stage that drops what it does not know.
    "stage": {
        "name": "OmniStageQwen3ForCausalLM",
        "registered": [True, True],
        "answer": "hidden",
        "given": [1, 2, None, 3],
    },
    "pipelines": {"dynamo_text": ["llm_ar"], "dynamo_rewrite": ["llm_ar", "diffusion"]},
    "cancellable": True,
    "methods": [True] * 4,
}


@pytest.mark.parametrize("about", OUTCOMES)
def test_vllm_omni_and_our_engine_agree(seen: dict[str, Any], about: str) -> None:
    assert seen[about] == OUTCOMES[about]


def test_check_tells_what_a_pipeline_gets_and_not_what_vllm_would(seen: dict[str, Any]) -> None:
    checked = seen["checked"]
    assert checked["problems"] == []
    assert checked["defaults"][:1] == ["pipeline"]
    assert "diffusion_load_format" in checked["defaults"]
    assert not {"enable_prefix_caching", "kv_events_config", "dtype"} & set(checked["defaults"])
    assert checked["events"] == "none from a pipeline of vLLM-Omni"
