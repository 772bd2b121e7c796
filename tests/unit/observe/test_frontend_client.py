"""The client of a frontend: which URL it takes, which certificates it accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dynamo_vllm.bench.http import target
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.observe import frontend_client
from harness.bad_server import make_certificate
from harness.live import live

if TYPE_CHECKING:
    from pathlib import Path


def test_certificate_of_a_frontend_on_this_machine_is_its_own_affair(tmp_path: Path) -> None:
    with live(certificate=make_certificate(tmp_path, "models.example")) as port:
        asked = frontend_client.FrontendClient(f"https://127.0.0.1:{port}", 60)
        assert asked.get("/live").status_code == 200
        asked.close()
        assert target.get(f"https://127.0.0.1:{port}/live", 5) == b""


def test_certificate_that_is_not_trusted_is_what_is_said(tmp_path: Path) -> None:
    with live(certificate=make_certificate(tmp_path, "models.example"), host="127.0.0.2") as port:
        asked = frontend_client.FrontendClient(f"https://127.0.0.2:{port}", 60)
        with pytest.raises(
            frontend_client.Unanswered, match="TLS failed: .*certificate verify failed.*SSL_CERT_FILE"
        ):
            asked.get("/live")
        asked.close()
        with pytest.raises(target.BenchError, match="certificate verify failed"):
            target.get(f"https://127.0.0.2:{port}/live", 5)


def test_every_spelling_names_the_same_frontend() -> None:
    for url in ("127.0.0.1:8000", *(f"http://127.0.0.1:8000{path}" for path in ("", "/", "/v1/"))):
        assert frontend_client.base(url) == "http://127.0.0.1:8000"
    for url in ("ftp://host", "http://", ""):
        with pytest.raises(ConfigError, match="is not the URL of a frontend"):
            frontend_client.base(url)
