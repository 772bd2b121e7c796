"""Adapters from a bucket of a real S3 server (moto's, as a process of its own)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_vllm.errors import AdapterRefused, BadCommand, SourceFailed
from dynamo_vllm.lora import sources
from dynamo_vllm.lora.base import Fetched
from dynamo_vllm.lora.sources import s3
from dynamo_vllm.lora.sources.base import SourceLimits
from harness.cut import Cut, cut
from harness.processes import free_port
from harness.waiting import until

boto3 = pytest.importorskip("boto3", reason="make venv-dev installs it")
pytest.importorskip("moto", reason="make venv-dev installs it")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BODIES = {CONFIG: b"{}", WEIGHTS: bytes(range(256)) * 12_000}
TOTAL = sum(map(len, BODIES.values()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    log = (tmp_path_factory.mktemp("moto") / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    try:
        until("the S3 server", lambda: listens(port), 120, every=0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def storage(server: int) -> Any:
    """The server as its owner reaches it."""
    return boto3.resource(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server}",
        region_name="us-east-1",
        aws_access_key_id="owner",
        aws_secret_access_key="owner",
    )


@pytest.fixture
def way(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cut]:
    """To the server, and all that boto3 knows of it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with cut(server) as made:
        for name, value in {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{made.port}",
            "AWS_ACCESS_KEY_ID": "key-of-a-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        }.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def bucket(storage: Any, way: Cut, request: pytest.FixtureRequest) -> Any:
    """A new bucket, reached without the cut."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[-60:]
    return storage.create_bucket(Bucket=name)


def put(bucket: Any, prefix: str, **bodies: bytes) -> None:
    for name, body in (BODIES | bodies).items():
        bucket.put_object(Key=f"{prefix}/{name}".lstrip("/"), Body=body)


def ignore(_done: int, _total: int | None) -> None:
    pass


async def fetch(bucket: Any, prefix: str, cache: Path, on_progress: Any = ignore, **limits: int) -> Fetched:
    name = bucket if isinstance(bucket, str) else bucket.name
    return await sources.fetch(f"s3://{name}/{prefix}", cache, SourceLimits(**limits), on_progress)


def downloads(way: Cut) -> list[str]:
    return [line for line in way.requests if line.startswith("GET") and "list-type" not in line]


async def test_prefix_is_fetched_with_progress_and_only_what_is_needed(
    bucket: Any, way: Cut, tmp_path: Path
) -> None:
    put(bucket, "team/sql", **{"README.md": b"x", "checkpoint-1/optimizer.pt": b"x"})
    put(bucket, "team/sql-other", **{WEIGHTS: b"other"})
    progress: list[tuple[int, int | None]] = []
    fetched = await fetch(bucket, "team/sql", tmp_path, lambda *told: progress.append(told))
    assert {path.name: path.read_bytes() for path in fetched.path.iterdir()} == BODIES
    assert fetched.bytes == TOTAL and fetched.path.parent == tmp_path
    assert len(downloads(way)) == 2
    done = [done for done, _ in progress]
    assert done == sorted(done) and done[-1] == TOTAL and len(set(done)) > 3
    assert {total for _, total in progress} == {TOTAL}


async def test_same_objects_are_downloaded_once_and_changed_ones_are_another_adapter(
    bucket: Any, way: Cut, tmp_path: Path
) -> None:
    put(bucket, "sql")
    first = await fetch(bucket, "sql", tmp_path)
    assert await fetch(bucket, "sql/", tmp_path) == first
    assert len(downloads(way)) == 2
    put(bucket, "sql", **{WEIGHTS: BODIES[WEIGHTS][::-1]})
    second = await fetch(bucket, "sql", tmp_path)
    assert first.digest != second.digest and first.path != second.path and first.path.exists()


async def test_whole_bucket_may_be_one_adapter(bucket: Any, tmp_path: Path) -> None:
    put(bucket, "")
    assert (await fetch(bucket, "", tmp_path)).bytes == TOTAL


async def test_without_credentials_it_asks_unsigned(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, "sql")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceFailed, match="refused: 403"):
        await fetch(bucket, "sql", tmp_path)
    bucket.Acl().put(ACL="public-read")
    for item in bucket.objects.all():
        item.Acl().put(ACL="public-read")
    assert (await fetch(bucket, "sql", tmp_path)).bytes == TOTAL


async def test_missing_bucket_and_missing_prefix(bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match=r"s3://no-such-bucket/x: 127.0.0.1:\d+ refused: NoSuchBucket"):
        await fetch("no-such-bucket", "x", tmp_path)
    with pytest.raises(SourceFailed, match="it is empty or does not exist"):
        await fetch(bucket, "nothing", tmp_path)
    with pytest.raises(BadCommand, match="is not the address of a bucket"):
        await fetch("bad bucket", "x", tmp_path)
    bucket.put_object(Key="half/adapter_config.json", Body=b"{}")
    with pytest.raises(AdapterRefused, match=f"there is no {WEIGHTS}"):
        await fetch(bucket, "half", tmp_path)


async def test_wrong_credentials_are_refused_without_being_told(
    bucket: Any, server: int, tmp_path: Path
) -> None:
    put(bucket, "sql")
    check_from_now_on(server, "0")
    try:
        with pytest.raises(SourceFailed, match="refused: InvalidAccessKeyId") as caught:
            await fetch(bucket, "sql", tmp_path)
    finally:
        check_from_now_on(server, "inf")
    assert "of-a-test" not in str(caught.value)


def check_from_now_on(server: int, requests: str) -> None:
    """moto checks credentials after so many requests."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server}/moto-api/reset-auth", requests.encode(), {"Content-Type": "text/plain"}
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


async def test_object_name_that_leads_elsewhere(bucket: Any, tmp_path: Path) -> None:
    put(bucket, "sql")
    for name in ("../evil", "a/../../evil", "..\\evil", "/etc/evil"):
        bucket.put_object(Key=f"sql/{name}", Body=b"x")
        with pytest.raises(AdapterRefused, match="leads out of the folder"):
            await fetch(bucket, "sql", tmp_path / "cache")
        bucket.Object(f"sql/{name}").delete()
    assert not (tmp_path / "cache").exists()


async def test_limits(bucket: Any, way: Cut, tmp_path: Path) -> None:
    put(bucket, "sql", **{"README.md": b"x"})
    with pytest.raises(AdapterRefused, match=f"has {TOTAL} bytes, the limit is {TOTAL - 1}"):
        await fetch(bucket, "sql", tmp_path, max_bytes=TOTAL - 1)
    with pytest.raises(AdapterRefused, match="has more than 2 objects; give the prefix of one adapter"):
        await fetch(bucket, "sql", tmp_path, max_objects=2)
    assert downloads(way) == []
    assert (await fetch(bucket, "sql", tmp_path, max_bytes=TOTAL, max_objects=3)).bytes == TOTAL


async def test_connection_that_breaks_leaves_nothing_and_the_next_try_works(
    bucket: Any, way: Cut, tmp_path: Path
) -> None:
    put(bucket, "sql")
    way.after = TOTAL // 2
    with pytest.raises(SourceFailed, match=r"127.0.0.1:\d+ broke off"):
        await fetch(bucket, "sql", tmp_path)
    assert os.listdir(tmp_path) == []
    way.after = None
    assert (await fetch(bucket, "sql", tmp_path)).bytes == TOTAL


async def test_object_that_changes_during_the_download(bucket: Any, tmp_path: Path) -> None:
    put(bucket, "sql")
    changed: list[int] = []

    def change_after_the_config(done: int, _total: int | None) -> None:
        if not changed:
            changed.append(done)
            put(bucket, "sql", **{WEIGHTS: BODIES[WEIGHTS][::-1]})

    with pytest.raises(SourceFailed, match="an object was written again meanwhile; load it again"):
        await fetch(bucket, "sql", tmp_path, change_after_the_config)
    assert os.listdir(tmp_path) == []


async def test_disk_that_is_full_or_cannot_be_written(
    bucket: Any, way: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, "sql")
    (tmp_path / "file").touch()
    with pytest.raises(SourceFailed, match="the files cannot be saved: Not a directory; see --lora-path"):
        await fetch(bucket, "sql", tmp_path / "file" / "cache")
    way.requests.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(SourceFailed, match=f"has 5 bytes free, the adapter {TOTAL}; see --lora-path"):
        await fetch(bucket, "sql", tmp_path)
    assert downloads(way) == []


async def test_unreachable_endpoint_is_told_soon(
    way: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://user:password@127.0.0.1:{port}")
    pauses: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time.sleep", pauses.append)  # between two attempts
    with pytest.raises(SourceFailed, match=f"127.0.0.1:{port} cannot be reached") as caught:
        await fetch("bucket", "sql", tmp_path)
    assert len(pauses) == s3.ATTEMPTS - 1 and sum(pauses) < 5
    assert "password" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
    with pytest.raises(SourceFailed, match="the settings of S3 cannot be used"):
        await fetch("bucket", "sql", tmp_path)


async def test_endpoint_that_says_nothing_is_given_up(
    way: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        with pytest.raises(SourceFailed, match=rf"127.0.0.1:{port} broke off \(ReadTimeoutError\)"):
            await fetch("bucket", "sql", tmp_path)
