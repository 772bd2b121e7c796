"""A hub of one repository on loopback: as much of its API as huggingface_hub asks for a download."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants


class Hub:
    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.repository, self.files = repository, files
        self.tags: dict[str, dict[str, bytes]] = {}
        """What other revisions hold; `files` are those of main."""
        self.downloads: list[str] = []
        self.is_gated = False
        self.tokens: set[str | None] = set()
        """What came with the requests."""
        self.cut_after: int | None = None
        """Bytes after which every download breaks off."""

    @property
    def commit(self) -> str:
        return commit_of(self.files)

    def at(self, revision: str) -> dict[str, bytes] | None:
        """By branch, tag or commit."""
        every = {"": self.files, "main": self.files, **self.tags}
        every |= {commit_of(files): files for files in every.values()}
        return every.get(revision)


def commit_of(files: dict[str, bytes]) -> str:
    found = hashlib.sha1()
    for name, body in sorted(files.items()):
        found.update(b"%s %d\n" % (name.encode(), len(body)) + body)
    return found.hexdigest()


@contextlib.contextmanager
def hub(repository: str, files: dict[str, bytes]) -> Iterator[tuple[Hub, str]]:  # noqa: C901
    """The hub and its address."""
    state = Hub(repository, files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = urlsplit(self.path).path
            state.tokens.add(self.headers.get("Authorization"))
            if path.startswith("/api/"):
                described = path.removeprefix("/api/models/").replace("/revision/", "/tree/")
                repository, _, revision = described.partition("/tree/")
                self.describe(repository, revision, is_tree="/tree/" in path)
                return
            owner_name, _, rest = path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            files = state.at(revision) or {}
            if owner_name != state.repository or name not in files:
                self.send({"X-Error-Code": "EntryNotFound"}, b"", 404)
                return
            self.file(files, name, with_body)

        def describe(self, repository: str, revision: str, is_tree: bool) -> None:
            files = state.at(revision)
            if repository != state.repository:
                self.send({"X-Error-Code": "RepoNotFound"}, b"{}", 404)
            elif state.is_gated:
                self.send({"X-Error-Code": "GatedRepo"}, b"{}", 403)
            elif files is None:
                self.send({"X-Error-Code": "RevisionNotFound"}, b"{}", 404)
            elif is_tree:
                entries = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in files.items()
                ]
                self.send({}, json.dumps(entries).encode())
            else:
                names = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
                info = {"_id": "1", "id": repository, "sha": commit_of(files), "siblings": names}
                self.send({}, json.dumps(info).encode())

        def file(self, files: dict[str, bytes], name: str, with_body: bool) -> None:
            body = files[name]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit_of(files)}
            if not with_body:
                self.send(headers | {"Content-Length": str(len(body))}, b"")
                return
            state.downloads.append(name)
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            headers |= {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
            part = body[start:]
            headers["Content-Length"] = str(len(part))
            if state.cut_after is not None:
                part = part[: state.cut_after]
                self.close_connection = True
            self.send(headers, part, 206 if start else 200)

        def send(self, headers: dict[str, str], body: bytes, status: int = 200) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The library reads its settings when it is imported, so that they are changed where it keeps them."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """In this process, with a cache of its own."""
    point_at(monkeypatch, address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
