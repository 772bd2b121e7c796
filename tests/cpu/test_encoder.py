"""Tests encode workers: the same answers, who ran the encoder, and what happens when an encoder fails."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tiny_models.vision import make_tiny_vision_model

from cpu.pairs import IN_FLIGHT
from cpu.stacks import Start
from cpu.vision import LONG_TEXT, TEXT, Parts, ask, body, cases, image, picture
from harness import listening
from harness.stack import Stack, Worker
from harness.waiting import until
from harness.warm import Zygote

KEPT_BYTES = 400_000
LOST = "dynamo_component_encodings_lost_total"
ALONE, HAND, CONNECTOR, NIXL, PAIR = "alone", "by-hand", "by-connector", "by-nixl", "pair"
"""The model names: one engine, three with encode workers, and prefill and decode workers with them."""
OTHER, OTHER_ENCODER = "by-other-connector", "other-encoder"
"""A worker and an encode worker with a connector that is not ours."""
OVER_NIXL = ("--encoder-transfer", "nixl")
SPLIT = {
    HAND: ("--route-to-encoder",),
    # As --ec-consumer-mode does, in the words of vLLM.
    CONNECTOR: ("--ec-transfer-config", '{"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer"}'),
}


@dataclass
class Split:
    """Is one model family: engines for images, alone or with an encode worker."""

    family: str
    stack: Stack
    warm: Zygote
    model: Path
    workers: dict[str, Worker] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.stack.folder / "encoded"

    def files(self) -> set[Path]:
        return {path for path in self.folder.rglob("*") if path.is_file()}

    def start(self, name: str, *flags: str) -> None:
        runs = self.stack.folder / f"{name}.runs"
        runs.touch()
        served = PAIR if name in ("prefill", "decode") else name
        folder = self.stack.folder / {NIXL: NIXL, OTHER: OTHER, OTHER_ENCODER: OTHER}.get(name, "encoded")
        more = ("--ec-storage-path", str(folder)) if name not in (ALONE, "decode") else ()
        self.workers[name] = self.warm.start_worker(
            self.stack,
            self.model,
            *("--served-model-name", served, "--enable-multimodal", "--log-level", "debug"),
            *("--worker-extension-cls", "cpu.counting.Counts"),
            *("--limit-mm-per-prompt", '{"image": 2, "video": 1}'),
            *more,
            *flags,
            env={"VISION_RUNS": str(runs)},
        )

    def start_encoder(self) -> None:
        kept = str(KEPT_BYTES / 1e9)
        self.start("encoder", "--disaggregation-mode", "encode", "--ec-storage-gb", kept, *OVER_NIXL)

    def runs(self, name: str) -> int:
        """Returns how often this worker's engine ran its vision encoder."""
        return (self.stack.folder / f"{name}.runs").stat().st_size

    def asked(self, name: str, parts: Parts) -> tuple[tuple[str, int], int, int]:
        """Returns the answer and how often the encoder ran: in the answering workers, in the encode one."""
        here = ("prefill", "decode") if name == PAIR else (name,)
        before = sum(map(self.runs, here)), self.runs("encoder")
        answer = ask(self.stack, name, parts)
        return answer, sum(map(self.runs, here)) - before[0], self.runs("encoder") - before[1]

    def lost(self, name: str) -> float:
        """Returns how often this worker got nothing usable from an encode worker."""
        return self.workers[name].metric(LOST)

    def kill(self, name: str) -> None:
        worker = self.workers.pop(name)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.process.wait(60)
        self.stack.workers.remove(worker)


WIDE, DEEP = "qwen2.5-vl", "qwen3-vl"
"""The family with every path, and the one whose encoder output is wider than the model."""
DEEP_TOO = pytest.param(DEEP, marks=pytest.mark.more)
MORE = [pytest.param(family, marks=pytest.mark.long) for family in ("qwen2-vl", "llava")]
once = pytest.mark.parametrize("split", [WIDE], indirect=True)
"""The family for tests that do not depend on the model."""
answers = pytest.mark.parametrize("split", [WIDE, DEEP_TOO, *MORE], indirect=True)
videos = pytest.mark.parametrize("split", [WIDE, DEEP_TOO, MORE[0]], indirect=True)


# The families have the same order everywhere, so that each is started once.
@pytest.fixture(scope="module", params=[WIDE, pytest.param(DEEP, marks=pytest.mark.long), *MORE])
def split(
    request: pytest.FixtureRequest, start_module: Start, tmp_path_factory: pytest.TempPathFactory
) -> Split:
    model = make_tiny_vision_model(tmp_path_factory.mktemp("split") / request.param, request.param)
    made = start_module.frontend()
    split = Split(request.param, made, start_module.warm, model)
    split.start(ALONE, "--component", "of-alone")
    for name, flags in SPLIT.items():
        split.start(name, "--component", f"of-{name}", *flags)
    if request.param == WIDE:
        split.start(NIXL, "--component", "of-nixl", "--route-to-encoder", *OVER_NIXL)
        for role, more in (("decode", ()), ("prefill", SPLIT[HAND])):
            split.start(role, "--connector", "nixl", "--disaggregation-mode", role, *more)
    split.start_encoder()
    made.wait_ready(120).wait_listed(ALONE, *ways(split))
    if PAIR in ways(split):
        made.wait_over_two(PAIR)
    return split


def ways(made: Split) -> list[str]:
    return [*SPLIT, *([NIXL, PAIR] if NIXL in made.workers else [])]


@answers
def test_answers_equal_one_engine_and_only_the_encode_worker_encodes(split: Split) -> None:
    for case, parts in cases(split.family).items():
        if "video" in case:
            continue
        expected = ask(split.stack, ALONE, parts)
        for way in ways(split):
            answer, here, _ = split.asked(way, parts)
            assert (way, case, answer, here) == (way, case, expected, 0)
    assert split.runs("encoder") > 0


@videos
def test_video_goes_by_connector_and_is_encoded_here_by_hand(split: Split) -> None:
    parts = cases(split.family)["video and image"]
    expected = ask(split.stack, ALONE, parts)
    assert split.asked(CONNECTOR, parts)[:2] == (expected, 0)
    answer, here, _ = split.asked(HAND, parts)
    assert answer == expected and here > 0


def test_a_picture_is_encoded_once_for_everybody(split: Split) -> None:
    parts = [image(picture(50)), TEXT]
    found = [split.asked(way, parts)[2] for way in (*ways(split), HAND)]
    assert found == [1, *[0] * (len(found) - 1)]
    again = [image(picture(50)), LONG_TEXT]  # no prefix in common: the engine needs the picture again
    assert split.asked(CONNECTOR, again)[1:] == (0, 0)
    with_a_new_one = [image(picture(51)), image(picture(50)), TEXT]
    assert split.asked(HAND, with_a_new_one)[1:] == (0, 1)


@once
def test_many_at_once_get_answers_about_their_own_pictures(split: Split) -> None:
    asked = [[image(picture(200 + number)), LONG_TEXT] for number in range(6)]
    expected = [ask(split.stack, ALONE, parts) for parts in asked]
    for way in ways(split):
        before = split.runs(way) if way != PAIR else 0
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda parts, way=way: ask(split.stack, way, parts), asked)) == expected
        assert way == PAIR or split.runs(way) == before


def wider(data: bytes) -> bytes:
    """Makes a tensor with half the rows and twice the width."""
    (size,) = struct.unpack("<Q", data[:8])
    told = json.loads(data[8 : 8 + size])
    rows, width = told["ec_cache"]["shape"]
    assert rows % 2 == 0
    told["ec_cache"]["shape"] = [rows // 2, width * 2]
    made = json.dumps(told).encode()
    return struct.pack("<Q", len(made)) + made + data[8 + size :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "wrong width": wider,
    "nan": lambda data: data[:-4] + struct.pack("<f", float("nan")),
}


def test_damaged_file_never_reaches_the_engine(split: Split) -> None:
    lost = split.lost(HAND)
    for number, (damage, change) in enumerate(DAMAGES.items()):
        for way, first in ((HAND, CONNECTOR), (CONNECTOR, HAND)):
            parts = [image(picture(300 + number, 112, 112 if way == HAND else 84)), TEXT]
            before = split.files()
            expected = ask(split.stack, first, parts)
            (path,) = split.files() - before
            path.write_bytes(change(path.read_bytes()))
            answer, here, there = split.asked(way, parts)
            assert (way, damage, answer, here, there) == (way, damage, expected, 1, 0)
            path.unlink()
    assert split.lost(HAND) - lost >= len(DAMAGES)
    assert all(worker.process.poll() is None for worker in split.workers.values())


@once
def test_what_is_refused_is_refused_as_by_one_engine(split: Split) -> None:
    """By the loader, by the model's processor, and for the prompt's length; no encoding counts as lost."""
    before = {way: split.lost(way) for way in SPLIT}
    refused = {
        "cut off": ([image(picture(700)[:200]), TEXT], "image 1 of 1: "),
        "a line": ([image(picture(701, 1000, 2)), TEXT], "the model's processor refuses the image"),
        "too long": ([image(picture(3, 640, 480)), {"type": "text", "text": "ba " * 1990}], "prompt has 20"),
    }
    for case, (parts, words) in refused.items():
        found = {
            way: split.stack.post("/v1/chat/completions", body(way, parts)) for way in (ALONE, *ways(split))
        }
        told = {way: (made.status_code, made.json()["message"]) for way, made in found.items()}
        assert told == dict.fromkeys(told, told[ALONE]), case
        assert told[ALONE][0] == 400 and words in told[ALONE][1]
    assert {way: split.lost(way) for way in SPLIT} == before


@once
def test_connector_that_is_not_ours_is_passed_on_with_a_warning(split: Split) -> None:
    (split.stack.folder / OTHER).mkdir()
    chosen = {"ec_connector": "OtherConnector", "ec_connector_module_path": "cpu.other_ec_connector"}
    names = {OTHER_ENCODER: ("ec_producer", "--component"), OTHER: ("ec_consumer", "--encoder-component")}
    for name, (role, component) in names.items():
        config = json.dumps({**chosen, "ec_role": role})
        own = ("--component", "of-other") if name == OTHER else ()
        split.start(name, "--ec-transfer-config", config, component, OTHER_ENCODER, *own)
    split.stack.wait_ready(120).wait_listed(OTHER)
    parts = [image(picture(800)), TEXT]
    before = {name: split.runs(name) for name in names}
    assert ask(split.stack, OTHER, parts) == ask(split.stack, ALONE, parts)
    assert {name: split.runs(name) - before[name] for name in names} == {OTHER_ENCODER: 1, OTHER: 0}
    for name in names:
        warning = "the encoder cache connector OtherConnector is passed on to vLLM and was not tested"
        assert warning in split.workers[name].log.read_text()
        split.kill(name)


@once
def test_encode_prefill_and_decode_listen_for_this_machine_only(split: Split) -> None:
    until("loopback only", lambda: listening.for_other_machines(split.stack.pids()) == [])


@once
def test_folder_keeps_to_its_limit(split: Split) -> None:
    for number in range(8):
        ask(split.stack, CONNECTOR, [image(picture(400 + number, 640, 480)), TEXT])
    assert 0 < sum(path.stat().st_size for path in split.files()) <= KEPT_BYTES


@once
def test_client_that_leaves_ends_the_wait_for_the_encoder(split: Split) -> None:
    encoder, asking = split.workers["encoder"], split.workers[HAND]
    os.killpg(encoder.pid, signal.SIGSTOP)
    try:
        with pytest.raises(httpx.ReadTimeout):
            url = f"{split.stack.url}/v1/chat/completions"
            httpx.post(url, json=body(HAND, [image(picture(500)), TEXT]), timeout=1)
        until("the asking worker is idle", lambda: asking.metric(IN_FLIGHT) == 0)
    finally:
        os.killpg(encoder.pid, signal.SIGCONT)
    until("the encode worker is idle", lambda: encoder.metric(IN_FLIGHT) == 0 == encoder.busy())


@once
def test_one_request_id_is_in_all_logs(split: Split) -> None:
    ask(split.stack, HAND, [image(picture(501)), TEXT])
    line = split.workers["encoder"].log.read_text().rsplit("media to encode", 1)[0].splitlines()[-1]
    asked_as = line.partition("request ")[2].partition(":")[0]
    assert asked_as and f"request {asked_as}: 1 media were encoded" in split.workers[HAND].log.read_text()


def test_encoder_killed_with_a_request_is_replaced_by_the_own_one(split: Split) -> None:
    """This test must be last: it kills the encode worker."""
    encoder, lost = split.workers["encoder"], split.lost(HAND)
    parts = {way: [image(picture(600 + number)), TEXT] for number, way in enumerate(SPLIT)}
    expected = {way: ask(split.stack, ALONE, asked) for way, asked in parts.items()}
    os.killpg(encoder.pid, signal.SIGSTOP)
    before, asking = split.runs(HAND), split.workers[HAND]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, split.stack, HAND, parts[HAND])
        until("the request", lambda: asking.metric(IN_FLIGHT) == 1)
        split.kill("encoder")
        assert (answer.result(), split.runs(HAND) - before) == (expected[HAND], 1)
    before = split.runs(CONNECTOR)  # gone, and discovery may still show it
    assert (ask(split.stack, CONNECTOR, parts[CONNECTOR]), split.runs(CONNECTOR) - before) == (
        expected[CONNECTOR],
        1,
    )
    assert split.lost(HAND) - lost >= 1
