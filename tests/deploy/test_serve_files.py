"""Every file under deploy/serve is one `serve --config` takes, every one under deploy/omni a stage file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_vllm.cli.start import serve
from dynamo_vllm.engine.omni import pipelines as omni_pipelines
from dynamo_vllm.engine.omni import stages as omni_stages
from dynamo_vllm.supervise.planning import plan

FILES = sorted((Path(__file__).parents[2] / "deploy" / "serve").glob("*.yaml"))
STAGES = sorted((Path(__file__).parents[2] / "deploy" / "omni").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_parses_and_plans(path: Path, tmp_path: Path) -> None:
    _, wanted = serve.understand([str(tmp_path), "--config", str(path)], {})
    found = plan.make(wanted, {}, tmp_path, [str(gpu) for gpu in range(8)])
    assert found.workers


@pytest.mark.parametrize("path", STAGES, ids=lambda path: path.name)
def test_stage_files_are_of_today(path: Path) -> None:
    found = omni_stages.read(str(path))
    assert not found.is_translated
    assert found.deploy["pipeline"] in (omni_pipelines.TEXT, omni_pipelines.REWRITE)


def test_there_are_files() -> None:
    assert FILES
    assert STAGES
