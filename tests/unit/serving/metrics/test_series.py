"""The worker's series as Prometheus reads them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dynamo_vllm.admin.base import WorkerState
from dynamo_vllm.engine.base import LoadFigures
from dynamo_vllm.serving.metrics.load_meter import LoadMeter
from dynamo_vllm.serving.metrics.series import Exposition


class Life:
    state = WorkerState.STARTING


def samples(exposition: Exposition) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name → labels → value, as a reader of the format finds them."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(exposition.text()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name.removeprefix("dynamo_component_"), {})[labels] = sample.value
    return found


def exposition(life: Life | None = None, **more: object) -> Exposition:
    meter = LoadMeter()
    meter.record(LoadFigures(0, 0, 0, 0.0))
    meter.record(LoadFigures(1, 3, 2, 0.5, 70, 40, 30))
    return Exposition(
        model='a"b\\',
        role="decode",
        meter=meter,
        in_flight=lambda: 4,
        life=life or Life(),
        **more,  # type: ignore[arg-type]
    )


def test_series_carry_rank_and_model_and_keep_the_last_digit() -> None:
    made = exposition()
    made.meter.record(LoadFigures(1, 3, 2, 0.5, 12345678901, 40, 30))
    found = samples(made)
    second = (("dp_rank", "1"), ("model", 'a"b\\'))
    names = "requests_running requests_waiting generated_tokens_total prefix_queries_total prefix_hits_total"
    assert [found[name][second] for name in names.split()] == [3, 2, 12345678901, 40, 30]
    assert list(found["requests_in_flight"].values()) == [4]


def test_one_state_at_a_time() -> None:
    life = Life()
    made = exposition(life)
    for state in (WorkerState.STARTING, WorkerState.UNWELL):
        life.state = state
        found = samples(made)["worker_state"]
        assert [dict(labels)["state"] for labels, value in found.items() if value] == [state.value]
        assert {dict(labels)["role"] for labels in found} == {"decode"}


def test_room_on_the_disk_of_folders_that_are_there(tmp_path: Path) -> None:
    folders = {"scratch": str(tmp_path), "adapters": str(tmp_path / "not yet")}
    found = samples(exposition(folders=folders))
    assert [dict(labels)["folder"] for labels in found["disk_free_bytes"]] == ["scratch"]
    (free,), (size,) = found["disk_free_bytes"].values(), found["disk_bytes"].values()
    assert 0 < free <= size
