"""What `--dump-config-to` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.serving.admin.config_dump import Dump, plain


def test_secrets_are_hidden_wherever_they_stand() -> None:
    flags = {
        "hf_token": "s3same",
        "tokenizer": "team/words",
        "max_num_batched_tokens": "8",
        "kv_transfer_config": '{"kv_connector_extra_config": {"api_key": "s3same", "url": "redis://me:s3same@r:1"}}',
        "otlp": "http://me:s3same@host:4317/x",
        "nested": [EngineSettings(model="m", environment={"AWS_SECRET_ACCESS_KEY": "s3same"})],
    }
    found = plain(flags)
    assert "s3same" not in json.dumps(found)
    assert (found["tokenizer"], found["max_num_batched_tokens"]) == ("team/words", "8")
    assert found["kv_transfer_config"]["kv_connector_extra_config"]["url"] == "redis://(hidden)@r:1"
    assert found["nested"][0]["model"] == "m"


def test_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--dump-config-to {tmp_path} cannot be written: Is a directory"):
        Dump(str(tmp_path)).add("options", {})
