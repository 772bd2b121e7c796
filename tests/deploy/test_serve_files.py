"""Every file under deploy/serve is one `serve --config` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_vllm.cli import serve

FILES = sorted((Path(__file__).parents[2] / "deploy" / "serve").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_parses_and_plans(path: Path, tmp_path: Path) -> None:
    _, wanted = serve.understand([str(tmp_path), "--config", str(path), "--engine", "fake"], {})
    assert wanted.workers


def test_there_are_files() -> None:
    assert FILES
