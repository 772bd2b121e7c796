"""Files under deploy/omni are stage files of today; `test_round_trip` reads those under deploy/serve."""

from __future__ import annotations

from pathlib import Path

from dynamo_vllm.engine.omni import pipelines as omni_pipelines
from dynamo_vllm.engine.omni import stages as omni_stages


def test_stage_files_are_of_today() -> None:
    paths = sorted((Path(__file__).parents[2] / "deploy" / "omni").glob("*.yaml"))
    assert paths
    for path in paths:
        stages = omni_stages.read(str(path))
        assert not stages.is_translated
        assert stages.deploy["pipeline"] in (omni_pipelines.TEXT, omni_pipelines.REWRITE)
