"""Tests prompt embeddings: what a client may send is read, and everything else is refused."""

from __future__ import annotations

import base64
import inspect
import os
import random
import tracemalloc
from typing import Any

import pytest
import torch
from vllm.inputs.engine import EmbedsInput
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreRequest

from dynamo_vllm.engine.vllm import convert as vllm_convert
from dynamo_vllm.engine.vllm.parts import embeds as vllm_embeds
from dynamo_vllm.errors import InvalidRequest, RequestError, TooLong
from dynamo_vllm.job import Embeds, Job, SamplingSpec
from harness.tensors import BAD, GOOD, HIDDEN, MARK, archive, encode, pickle_of, rows


def read(text: str, max_rows: int = 2047, dtype: torch.dtype = torch.float32) -> Embeds:
    return vllm_embeds.read(text, HIDDEN, max_rows, dtype)


@pytest.mark.parametrize("name", GOOD)
def test_tensor_comes_out_as_it_went_in(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sent = GOOD[name]()
        found = read(encode(sent), dtype=dtype)
        wanted = (sent.detach()[0] if sent.dim() == 3 else sent.detach()).to(dtype)
        assert found.rows == len(wanted)
        assert found.tensor.dtype == dtype
        assert found.tensor.is_contiguous()
        assert not found.tensor.requires_grad
        assert not found.tensor.is_neg()
        assert found.tensor.untyped_storage().nbytes() == wanted.numel() * wanted.itemsize
        assert torch.equal(found.tensor, wanted)


@pytest.mark.parametrize("name", BAD)
def test_refused_by_name_and_cheaply(name: str) -> None:
    make, message = BAD[name]
    text = make()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            read(text)
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 8 * len(text)
    finally:
        tracemalloc.stop()
    assert caught.value.parameter == "prompt_embeds"
    assert message in str(caught.value)
    assert MARK not in os.environ


def test_rows_up_to_the_limit_and_not_one_more() -> None:
    assert read(encode(rows(64)), max_rows=64).rows == 64
    with pytest.raises(TooLong, match=r"prompt_embeds: has 65 rows; this model accepts 64"):
        read(encode(rows(65)), max_rows=64)


def test_file_beyond_what_the_model_could_take_is_not_decoded() -> None:
    with pytest.raises(InvalidRequest, match=r"has 300000 bytes; this model accepts at most 86016"):
        read("A" * 400000, max_rows=10)
    with pytest.raises(InvalidRequest, match=f"at most {vllm_embeds.MAX_BYTES}"):
        read("A" * 100_000_000, max_rows=10**9)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_damaged_files_are_refused_or_harmless() -> None:
    """Changes, removes or doubles bytes anywhere, or changes some of the pickle and corrects the checksum."""
    chance = random.Random(7)
    whole = base64.b64decode(encode(rows(2)))
    pickled, values = pickle_of(encode(rows(2))), rows(2).numpy().tobytes()
    refused = [0, 0]
    for _ in range(2000):
        data, changed = bytearray(whole), bytearray(pickled)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randrange(1, 20)]
                case _:
                    data[at:at] = data[at : at + chance.randrange(1, 20)]
            other = pickled[chance.randrange(len(pickled))]
            changed[chance.randrange(len(changed))] = chance.choice([chance.randrange(256), other])
        refused[0] += is_refused(base64.b64encode(data).decode())
        refused[1] += is_refused(archive(bytes(changed), values))
    assert min(refused) > 1000


def is_refused(text: str) -> bool:
    try:
        found = read(text)
    except RequestError:
        return True
    assert found.tensor.shape == (found.rows, HIDDEN)
    assert found.rows <= 4
    assert float(found.tensor.abs().max()) <= vllm_embeds.MAX_VALUE
    return False


def job(answered: int = 0, **more: Any) -> Job:
    embeds = Embeds(3, rows(3))
    return Job("j", [0] * 3 + [7] * answered, SamplingSpec(max_tokens=1), embeds=embeds, **more)


def test_engine_gets_rows_and_placeholders() -> None:
    made = vllm_convert.engine_input(job(cache_salt="s"))
    assert torch.equal(made.pop("prompt_embeds"), rows(3))
    assert made == {
        "type": "embeds",
        "prompt_token_ids": [0, 0, 0],
        "is_token_ids": [False] * 3,
        "cache_salt": "s",
    }


def test_answer_begun_elsewhere_stands_as_tokens_behind_the_rows() -> None:
    made = vllm_convert.engine_input(job(answered=2, cache_salt="s"))
    assert made["prompt_embeds"].shape == (5, HIDDEN)
    assert torch.equal(made["prompt_embeds"][:3], rows(3))
    assert made["prompt_token_ids"] == [0, 0, 0, 7, 7]
    assert made["is_token_ids"] == [False, False, False, True, True]
    assert made["cache_salt"] == "js"


def test_vllm_has_what_the_input_is_made_of() -> None:
    assert {"prompt_embeds", "prompt_token_ids", "is_token_ids"} <= set(EmbedsInput.__annotations__)
    assert {"prompt_embeds", "prompt_is_token_ids"} <= set(EngineCoreRequest.__struct_fields__)


def test_events_are_built_from_what_our_patches_use() -> None:
    """The block's start has a name, and is passed as a keyword argument."""
    wanted = {"request", "start_token_idx", "extra_keys_list"}
    assert wanted <= set(inspect.signature(BlockPool._build_block_stored_event).parameters)


def test_prefill_job_carries_no_placeholders() -> None:
    made = vllm_convert.engine_input(job(transfer={"do_remote_decode": True}))
    assert set(made) == {"type", "prompt_embeds"}
    assert "is_token_ids" in vllm_convert.engine_input(job(transfer={"do_remote_prefill": True}))
