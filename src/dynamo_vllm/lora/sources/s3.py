"""Downloads an adapter from an S3 bucket, with boto3.

boto3 finds endpoint, region and credentials; without credentials requests are unsigned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dynamo_vllm.errors import AdapterRefused, BadCommand, SourceFailed
from dynamo_vllm.lora.base import NEEDED
from dynamo_vllm.lora.sources import base
from dynamo_vllm.lora.sources.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from botocore.client import BaseClient

    from dynamo_vllm.lora.base import Fetched, OnProgress

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 30, 2


@dataclass(frozen=True, slots=True)
class Object:
    key: str
    size: int
    etag: str


def fetch(uri: str, cache: Path, limits: base.SourceLimits, report: OnProgress) -> Fetched:
    bucket, prefix = _address(uri)
    client = _client(uri)
    with _errors_named(uri, client):
        found = _list(client, bucket, prefix, limits, uri)
        base.check_names({name: item.size for name, item in found.items()}, limits, uri)
        wanted = {name: found[name] for name in NEEDED}
        folder = _bring(client, bucket, wanted, Store(cache), report)
    return base.take(folder, folder, limits, uri, report)


def _address(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not bucket or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise BadCommand(f"{uri!r} is not the address of a folder in a bucket; write s3://bucket/prefix")
    base.refuse_archive(prefix, uri)
    return bucket, f"{prefix}/" if prefix else ""


def _client(uri: str) -> BaseClient:
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise SourceFailed(f"{uri} needs boto3; run: pip install 'dynamo-vllm[s3]'") from None
    try:
        session = boto3.session.Session()
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            signature_version=None if session.get_credentials() else UNSIGNED,
        )
        return session.client("s3", config=config)
    except (BotoCoreError, ValueError) as exc:  # ValueError: an invalid endpoint
        raise SourceFailed(f"{uri}: the settings of S3 cannot be used: {type(exc).__name__}") from exc


def _list(
    client: BaseClient, bucket: str, prefix: str, limits: base.SourceLimits, uri: str
) -> dict[str, Object]:
    """Return the objects below the prefix, by name."""
    answer = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=limits.max_objects)
    if answer.get("IsTruncated"):
        raise AdapterRefused(
            f"{uri} has more than {limits.max_objects} objects; give the prefix of one adapter"
        )
    found = {}
    for item in answer.get("Contents", ()):
        name = item["Key"].removeprefix(prefix)
        if "\\" in name or name.startswith("/") or ".." in name.split("/"):
            raise AdapterRefused(f"{uri}: the object name {name[:200]!r} leads out of the folder")
        if name and not name.endswith("/"):
            found[name] = Object(item["Key"], item["Size"], item.get("ETag", ""))
    return found


def _bring(
    client: BaseClient, bucket: str, wanted: Mapping[str, Object], store: Store, report: OnProgress
) -> Path:
    """Reuse an earlier download of the same objects, or download again."""
    name = _folder_name(client.meta.endpoint_url, bucket, wanted)
    sizes = {file: item.size for file, item in wanted.items()}
    folder = store.find(name, sizes)
    if folder is not None:
        return folder
    total = sum(sizes.values())
    store.clean()
    with store.part() as part:
        free = shutil.disk_usage(part).free
        if total > free:
            raise SourceFailed(f"{part.parent} has {free} bytes free, the adapter {total}; see --lora-path")
        done = 0
        for file, item in wanted.items():
            done = _download(client, bucket, item, part / file, done, total, report)
        return store.keep(part, name, sizes)


def _folder_name(endpoint: str, bucket: str, wanted: Mapping[str, Object]) -> str:
    """Return a name for this version of the objects; an object that was written again has another ETag."""
    facts = [endpoint, bucket, *([item.key, item.size, item.etag] for item in wanted.values())]
    return f"s3-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"


def _download(
    client: BaseClient, bucket: str, item: Object, path: Path, done: int, total: int, report: OnProgress
) -> int:
    # The condition prevents mixing files of two versions in one adapter.
    condition = {"IfMatch": item.etag} if item.etag else {}
    body = client.get_object(Bucket=bucket, Key=item.key, **condition)["Body"]
    came = 0
    with contextlib.closing(body), path.open("xb") as file:
        for chunk in body.iter_chunks(base.CHUNK_BYTES):
            came += len(chunk)
            if came > item.size:
                break
            file.write(chunk)
            report(done + came, total)
        file.flush()
        os.fsync(file.fileno())
    if came != item.size:
        raise SourceFailed(f"s3://{bucket}/{item.key} has {came} bytes instead of {item.size}")
    return done + came


@contextlib.contextmanager
def _errors_named(uri: str, client: BaseClient) -> Iterator[None]:
    from botocore import exceptions as boto

    endpoint = urlsplit(client.meta.endpoint_url)
    host = f"{endpoint.hostname}:{endpoint.port}" if endpoint.port else endpoint.hostname
    try:
        yield
    except boto.ParamValidationError:
        raise BadCommand(f"{uri!r} is not the address of a bucket; write s3://bucket/prefix") from None
    except boto.ClientError as exc:
        raise SourceFailed(f"{uri}: {host} refused: {_refusal(exc.response)}") from None
    except (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError) as exc:
        raise SourceFailed(f"{uri}: {host} cannot be reached ({type(exc).__name__})") from None
    except boto.BotoCoreError as exc:
        # Only the kind: the text may contain addresses with credentials.
        raise SourceFailed(f"{uri}: {host} broke off ({type(exc).__name__})") from None
    except OSError as exc:
        raise SourceFailed(f"{uri}: the files cannot be saved: {exc.strerror}; see --lora-path") from exc


def _refusal(response: Mapping[str, Any]) -> str:
    error = response.get("Error", {})
    code = error.get("Code", "unknown")
    if code in ("PreconditionFailed", "412"):
        return "an object was written again meanwhile; load it again"
    return f"{code}: {error.get('Message', '')[:200]}".rstrip(": ")
