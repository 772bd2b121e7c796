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


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("picture", [[None, "stop", True, [PNG, PNG]]]),
        ("text, then picture", [["a cat in the sun", None, False, []], [None, "stop", True, [PNG]]]),
        ("nothing", "EngineRequestFailed: the pipeline ended without generating anything"),
        ("no output at all", "EngineRequestFailed: the pipeline ended without generating anything"),
        ("error", "EngineRequestFailed: no memory"),
        ("abort", [[None, "abort", True, []]]),
        ("sound", [[None, "stop", True, [["audio", "audio/wav", "52494646"]]]]),
    ],
)
def test_outcome_of_a_drawing(seen: dict[str, Any], case: str, outcome: Any) -> None:
    assert seen["outcomes"][case] == outcome


def test_a_text_that_does_not_end_is_an_error(seen: dict[str, Any]) -> None:
    failed = "EngineRequestFailed: the pipeline ended without finishing its text"
    assert seen["written"]["whole"] == [["a", None, False], ["b", "stop", True]]
    assert (seen["written"]["empty"], seen["written"]["cut"]) == (failed, failed)


def test_a_cache_salt_reaches_the_text_stage(seen: dict[str, Any]) -> None:
    assert seen["written"]["salted"] == {"prompt_token_ids": [1, 2], "cache_salt": "me"}


@pytest.mark.parametrize("first", ["job", "health check"])
def test_a_dead_stage_is_a_dead_engine_whoever_meets_it_first(seen: dict[str, Any], first: str) -> None:
    assert seen["dead"][first] == ["EngineDead", "left behind"]


def test_a_dead_drawing_stage_is_let_go(seen: dict[str, Any]) -> None:
    assert seen["goodbye"] is True


def test_an_aborted_drawing_is_no_success(seen: dict[str, Any]) -> None:
    assert seen["aborted"] == [[["abort", True, 0]], ["j"]]


def test_a_long_drawing_is_no_hang_but_a_silent_canary_is(seen: dict[str, Any]) -> None:
    assert seen["silence"] == {"client": True, "canary-1": False, "warm-up": False}


def test_a_spec_reaches_the_stages(seen: dict[str, Any]) -> None:
    assert seen["prompt"] == {"prompt": "a cat", "negative_prompt": "dog"}
    assert seen["picture"] == {
        "seed": 7,
        "num_outputs_per_prompt": 2,
        "width": 8,
        "height": 16,
        "num_inference_steps": 3,
        "guidance_scale": 2.0,
    }
    assert seen["text"] == ["FINAL_ONLY", 7]


def test_sound_becomes_a_wav_file(seen: dict[str, Any]) -> None:
    assert seen["sound"] == [1, 2, 16000, 480]


def test_check_tells_what_a_pipeline_gets_and_not_what_vllm_would(seen: dict[str, Any]) -> None:
    found = seen["checked"]
    assert found["problems"] == []
    assert found["defaults"][:1] == ["pipeline"]
    assert "diffusion_load_format" in found["defaults"]
    assert not {"enable_prefix_caching", "kv_events_config", "dtype"} & set(found["defaults"])
    assert found["events"] == "none from a pipeline of vLLM-Omni"


def test_what_diffusers_draws_is_not_told_to_be_eager(seen: dict[str, Any]) -> None:
    """The diffusers adapter never compiles and refuses the flag; a text stage before it gets the flag."""
    assert seen["eager"] == [{}, {"stage_0_enforce_eager": True}]


def test_the_length_of_a_video_reaches_the_stage(seen: dict[str, Any]) -> None:
    assert seen["length"] == [5, 8]


def test_two_channels_stay_two(seen: dict[str, Any]) -> None:
    assert seen["stereo"] == [2, 100, 0, 32767]


def test_frames_become_a_film_however_a_pipeline_gives_them(seen: dict[str, Any]) -> None:
    film = ["video/mp4", 16, 18, 8.0, 0, 3, True]
    with_sound = ["video/mp4", 16, 18, 8.0, 1, 3, True]
    assert seen["filmed"] == {
        "pictures": film,
        "bare pictures": film,
        "array": with_sound,
        "tensor": film,
        "below zero": film,
        "odd": film,
    }


def test_what_is_no_picture_is_said_to_be_none(seen: dict[str, Any]) -> None:
    assert seen["no picture"] == "the pipeline generated list, not an image"


def test_a_plain_model_becomes_a_stage_that_drops_what_it_does_not_know(seen: dict[str, Any]) -> None:
    assert seen["stage"] == {
        "name": "OmniStageQwen3ForCausalLM",
        "registered": [True, True],
        "answer": "hidden",
        "given": [1, 2, None, 3],
    }


def test_our_pipelines_are_registered(seen: dict[str, Any]) -> None:
    assert seen["pipelines"] == {"dynamo_text": ["llm_ar"], "dynamo_rewrite": ["llm_ar", "diffusion"]}


def test_the_diffusers_adapter_can_be_cancelled(seen: dict[str, Any]) -> None:
    assert seen["cancellable"] is True


def test_the_names_we_use_are_there(seen: dict[str, Any]) -> None:
    assert all(seen["methods"])
