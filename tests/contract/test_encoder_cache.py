"""Tests encoder outputs between engines: the files, and the connector as vLLM calls it."""

from __future__ import annotations

import inspect
import json
import os
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from dynamo_vllm.engine.encoder_cache import connector as encoder_cache_connector
from dynamo_vllm.engine.encoder_cache.connector import FolderConnector
from dynamo_vllm.engine.encoder_cache.folder import TENSOR, Folder, Unusable, engine_config
from dynamo_vllm.engine.vllm import kv_compatibility
from dynamo_vllm.engine.vllm.parts import media as vllm_media
from dynamo_vllm.engine.vllm.parts.encoded import Encoded

A, B = "a" * 64, "b" * 64
ROUTED = f"{'0' * 16}-{A}"
ROWS, WIDTH = 6, 8
MADE = torch.arange(ROWS * WIDTH, dtype=torch.bfloat16).reshape(ROWS, WIDTH)


# --- files -----------------------------------------------------------------------------------------------


def test_what_is_written_is_read_under_every_name_of_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 10**6)
    folder.write(ROUTED, MADE.t().contiguous().t(), {"image_grid_thw": [1, 4, 6]})
    for name in (A, ROUTED):
        tensor, about = folder.read(name, WIDTH, torch.bfloat16, ROWS)
        assert torch.equal(tensor, MADE) and about == {"image_grid_thw": [1, 4, 6]}
    assert [path.name for path in tmp_path.iterdir()] == [f"{A}.safetensors"]


_HEADER = json.dumps(
    {"__metadata__": None, "ec_cache": {"dtype": "BF16", "shape": [ROWS, WIDTH], "data_offsets": [0, 96]}}
).encode()
NO_METADATA = struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(96)


def bad(**tensors: Any) -> Any:
    return lambda path: save_file(tensors, path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "FileNotFoundError"),
        (lambda path: path.write_bytes(b""), "SafetensorError"),
        (lambda path: path.write_bytes(b"\xff" * 100), "SafetensorError"),
        (bad(other=MADE), "not only ec_cache"),
        (bad(ec_cache=MADE, other=MADE.clone()), "not only ec_cache"),
        (bad(ec_cache=MADE[:, :4].contiguous()), r"shape is \(6, 4\), not \(6, 8\)"),
        (bad(ec_cache=MADE[:5].contiguous()), r"shape is \(5, 8\), not \(6, 8\)"),
        (bad(ec_cache=MADE.flatten()), "its shape is"),
        (bad(ec_cache=MADE[None]), "its shape is"),
        (bad(ec_cache=MADE[0, 0].clone()), "its shape is"),
        (lambda path: path.write_bytes(NO_METADATA), "AttributeError|SafetensorError"),
        (lambda path: save_file({"ec_cache": MADE}, path, {"about": "[" * 20_000}), "RecursionError"),
        (bad(ec_cache=MADE.float()), "torch.float32, not torch.bfloat16"),
        (bad(ec_cache=MADE / 0), "NaN or infinite values"),
        (bad(ec_cache=torch.zeros(10**4, WIDTH, dtype=torch.bfloat16)), "more than"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, reason: str, tmp_path: Path) -> None:
    make(tmp_path / f"{A}.safetensors")
    with pytest.raises(Unusable, match=reason):
        Folder(tmp_path, 10**6).read(A, WIDTH, torch.bfloat16, ROWS)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    folder, big, over = Folder(tmp_path, 10**9), torch.ones(4096, WIDTH), threading.Event()
    folder.write(A, big, {})

    def write() -> None:
        while not over.is_set():
            folder.write(A, big, {})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            folder.read(A, WIDTH, torch.float32, 4096)
    finally:
        over.set()
        writer.join()


def test_writing_keeps_the_folder_within_its_bytes(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2000)
    for number in range(40):
        folder.write(f"{number:064x}", torch.ones(10, WIDTH), {})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
        assert folder.has(f"{number:064x}")


# --- the connector ---------------------------------------------------------------------------------------


def test_connector_has_the_methods_vllm_calls() -> None:
    for name, ours in vars(FolderConnector).items():
        theirs = getattr(ECConnectorBase, name, None)
        if theirs is not None and inspect.isfunction(ours) and not name.startswith("__"):
            wanted = set(inspect.signature(theirs).parameters) - {"kwargs"}
            assert wanted - {"kwargs"} <= set(inspect.signature(ours).parameters) | {"_"}, name
    assert not FolderConnector.__abstractmethods__


def config(role: str, folder: Path, **model: Any) -> Any:
    of_model = {
        "model": "m",
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "multimodal_config": SimpleNamespace(
            mm_processor_kwargs={"max_pixels": 9}, mm_encoder_attn_dtype=None
        ),
        "hf_overrides": {},
        "get_inputs_embeds_size": lambda: WIDTH,
        "hf_config": SimpleNamespace(vision_config=SimpleNamespace()),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**of_model | model),
        ec_transfer_config=ECTransferConfig(**engine_config(role, str(folder), 10**6)),
    )


def make(role: str, folder: Path, at: Any = ECConnectorRole.SCHEDULER, **model: Any) -> FolderConnector:
    made = ECConnectorFactory.create_connector(config(role, folder, **model), at)
    assert isinstance(made, FolderConnector)
    return made


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    """Returns the folder of the engines that `make` creates."""
    return Folder(tmp_path / kv_compatibility.encoder(config("ec_consumer", tmp_path)), 10**6)


def request(name: str, *identifiers: str, rows: int = ROWS) -> Any:
    place = SimpleNamespace(get_num_embeds=lambda: rows)
    features = [
        SimpleNamespace(identifier=one, mm_position=place, data=None, modality="image") for one in identifiers
    ]
    return SimpleNamespace(request_id=name, mm_features=features)


def test_consumer_loads_what_fits_and_leaves_the_rest_to_the_encoder(tmp_path: Path, own: Folder) -> None:
    own.write(A, MADE, {})
    connector = make("ec_consumer", tmp_path)
    asked = request("r", ROUTED, B)
    assert not connector.has_cache_item(ROUTED), "nobody said how many rows there must be"
    assert connector.ensure_cache_available(asked, 0)
    assert connector.has_cache_item(ROUTED) and not connector.has_cache_item(B)
    (own.path / f"{A}.safetensors").unlink()  # it was read: nothing depends on the file any more
    connector.update_state_after_alloc(asked, 0)
    connector.update_state_after_alloc(asked, 1)
    step = connector.build_connector_meta(SimpleNamespace())
    assert list(step.loaded) == [ROUTED]
    assert connector.build_connector_meta(SimpleNamespace()).loaded == {}
    worker = make("ec_consumer", tmp_path, ECConnectorRole.WORKER)
    cache: dict[str, Any] = {}
    worker.bind_connector_metadata(step)
    worker.start_load_caches(cache)
    assert torch.equal(cache[ROUTED], MADE)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"revision": "2"},
        {"quantization": "fp8"},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs=None, mm_encoder_attn_dtype=None)},
        {"hf_overrides": {"vision_config": {"depth": 2}}},
    ],
)
def test_consumer_takes_nothing_of_another_size_or_another_models_encoder(
    tmp_path: Path, own: Folder, other: Any
) -> None:
    own.write(A, MADE, {})
    for fits, rows, model in ((True, ROWS, {}), (False, ROWS + 1, {}), (False, ROWS, other)):
        connector = make("ec_consumer", tmp_path, **model)
        connector.ensure_cache_available(request("r", A, rows=rows), 0)
        assert connector.has_cache_item(A) is fits


def test_consumer_forgets_with_the_last_request(tmp_path: Path, own: Folder) -> None:
    own.write(A, MADE, {})
    connector = make("ec_consumer", tmp_path)
    first, second = request("1", A), request("2", A)
    for asked in (first, second, second):
        connector.ensure_cache_available(asked, 0)
    connector.request_finished(first)
    assert connector.has_cache_item(A), "the second still wants it"
    for asked in (second, second, request("never seen", A)):
        connector.request_finished(asked)
    assert not connector.has_cache_item(A)
    assert not (connector._rows or connector._users or connector._ready or connector._seen)


def test_producer_writes_at_once_and_again_what_the_folder_lost(
    tmp_path: Path, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_cache_connector, "get_tensor_model_parallel_rank", lambda: 0)
    worker = make("ec_producer", tmp_path, ECConnectorRole.WORKER)
    path = own.path / f"{A}.safetensors"
    cache: dict[str, torch.Tensor] = {}
    worker.bind_connector_metadata(encoder_cache_connector.Step(about={A: {"grid": [1]}}))
    worker.start_save_caches(cache)
    assert not path.exists()
    cache[A] = MADE
    worker.save_caches(cache, A)
    assert own.read(A, WIDTH, torch.bfloat16)[1] == {"grid": [1]}
    os.unlink(path)
    worker.start_save_caches(cache)
    assert path.exists()
    worker.save_caches(cache | {"canary": MADE}, "canary")
    assert [found.name for found in own.path.iterdir()] == [path.name]
    path.unlink()
    own.path.rmdir()
    worker.save_caches({A: MADE}, A)  # as on a full disk: it does not end the engine
    assert not path.exists()


def test_producer_does_not_encode_what_another_one_has(tmp_path: Path, own: Folder) -> None:
    producer = make("ec_producer", tmp_path)
    assert not producer.has_cache_item(A)
    own.write(A, MADE, {})
    assert producer.has_cache_item(A) and not producer.has_cache_item(B)


# --- what is given by hand -------------------------------------------------------------------------------


def info(fields: dict[str, str] | None) -> Any:
    parser = SimpleNamespace(embedding_fields={"image": fields} if fields else {})
    vision = SimpleNamespace(spatial_merge_size=2)
    return SimpleNamespace(data_parser=parser, get_hf_config=lambda: SimpleNamespace(vision_config=vision))


GRID = {"image_embeds": "values", "image_grid_thw": "metadata"}


def test_models_with_a_grid_get_it_and_others_rows_alone() -> None:
    items = [Encoded(MADE, {"image_grid_thw": [1, 4, 6]})] * 2
    packed = vllm_media._packed(info(GRID), "image", items)
    assert packed["image_embeds"].shape == (2 * ROWS, WIDTH)
    assert packed["image_grid_thw"].tolist() == [[1, 4, 6]] * 2
    assert vllm_media._packed(info(None), "image", items) == [MADE, MADE]


@pytest.mark.parametrize(
    "grid",
    [None, [1, 4, 4], [-1, -4, 6], [1, 4], "1,4,6", [1, 2.0, 12], [[1, 4, 6]] * 2, [4, 2, 3], [1, 1, 24]],
)
def test_a_grid_that_does_not_fit_the_rows_is_refused(grid: Any) -> None:
    with pytest.raises(Unusable, match="does not fit 6 rows"):
        vllm_media._packed(info(GRID), "image", [Encoded(MADE, {"image_grid_thw": grid})])


def test_a_model_that_wants_more_is_not_served_by_hand() -> None:
    with pytest.raises(Unusable, match="this model needs"):
        vllm_media._packed(info(GRID | {"slices": "metadata"}), "image", [Encoded(MADE, {})])


def test_the_tensor_has_the_name_vllm_gives_it() -> None:
    from vllm.distributed.ec_transfer.ec_connector import example_connector

    assert f'"{TENSOR}"' in inspect.getsource(example_connector)
