"""Stands in for the Kubernetes API: takes what processes write, lists nothing, notes what it was asked."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Api:
    """What was asked, and what was written by path."""

    folder: Path
    port: int = 0
    asked: set[str] = field(default_factory=set)
    written: dict[str, Any] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)

    def env(self, pod: str) -> dict[str, str]:
        """For a process in a pod of that name."""
        named = {"server": f"http://127.0.0.1:{self.port}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": named}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        }
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return {
            "DYN_DISCOVERY_BACKEND": "kubernetes",
            "KUBECONFIG": str(path),
            "POD_NAME": pod,
            "POD_NAMESPACE": "ns",
            "POD_UID": f"uid-of-{pod}",
        }


@contextmanager
def kubernetes(folder: Path) -> Iterator[Api]:
    api = Api(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            api.asked.add(f"{'watch' if 'watch=true' in parts.query else 'list'} {parts.path}")
            if "watch=true" in parts.query:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                api.stopping.wait(60)  # nothing changes
                self.close_connection = True
                return
            self._answer({"metadata": {"resourceVersion": "1"}, "items": []})

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            api.written[urlsplit(self.path).path] = body
            self._answer(body)

        def _answer(self, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    api.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield api
    finally:
        api.stopping.set()
        server.shutdown()
        server.server_close()
