"""A Kubernetes API server in small: what the runtime's discovery asks of one, for an account with one role.

It plays the kubelet and the controller of EndpointSlices too: a pod's endpoint is ready when its readiness
probe says so, and a slice has the labels of its Service.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Document = dict[str, Any]
SLICES, RECORDS = ("discovery.k8s.io", "endpointslices"), ("nvidia.com", "dynamoworkermetadatas")
KINDS = {SLICES: ("v1", "EndpointSlice"), RECORDS: ("v1alpha1", "DynamoWorkerMetadata")}
TOKEN = "of-the-service-account"
PROBE_SECONDS = 0.3


@dataclass
class Pod:
    """One that runs on this machine, and where its probe is asked."""

    name: str
    uid: str
    health: str
    service: Document
    is_ready: bool = False


@dataclass
class Cluster:
    """The objects of one namespace and everybody who watches them."""

    namespace: str
    rules: list[Document]
    """Of the role that every caller has."""
    version: int = 1
    objects: dict[tuple[str, str], dict[str, Document]] = field(default_factory=dict)
    events: list[tuple[int, tuple[str, str], Document]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    asked: set[tuple[str, str]] = field(default_factory=set)
    """Resource and verb."""
    pods: list[Pod] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_over: bool = False

    def allows(self, group: str, resource: str, verb: str) -> bool:
        return any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.rules
        )

    def put(self, kind: tuple[str, str], name: str, made: Document) -> Document:
        with self.changed:
            self.version += 1
            there = self.objects.setdefault(kind, {})
            old = there.get(name)
            made = {**made, "metadata": {**made["metadata"], "namespace": self.namespace}}
            made["metadata"]["resourceVersion"] = str(self.version)
            made["metadata"]["generation"] = self.version
            made["metadata"]["uid"] = old["metadata"]["uid"] if old else f"uid-of-{name}"
            there[name] = made
            what = {"type": "MODIFIED" if old else "ADDED", "object": made}
            self.events.append((self.version, kind, what))
            self.changed.notify_all()
        return made

    def watch_pods(self) -> None:
        """Until the cluster is over."""
        while not self.is_over:
            for pod in list(self.pods):
                ready = _answers(pod.health)
                if ready != pod.is_ready or not self.objects.get(SLICES, {}).get(f"{pod.name}-slice"):
                    pod.is_ready = ready
                    self.put(SLICES, f"{pod.name}-slice", _slice(pod))
            time.sleep(PROBE_SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _slice(pod: Pod) -> Document:
    ref = {"kind": "Pod", "name": pod.name, "uid": pod.uid, "namespace": "models"}
    ready = {"ready": pod.is_ready, "serving": pod.is_ready, "terminating": False}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{pod.name}-slice", "labels": pod.service["metadata"]["labels"]},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": ready, "targetRef": ref}],
        "ports": [{"name": "system", "port": 9090, "protocol": "TCP"}],
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        words = parts.path.strip("/").split("/")  # apis GROUP VERSION namespaces NAME RESOURCE [OBJECT]
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        group, resource = (words[1], words[5]) if len(words) > 5 else ("", parts.path)
        name = words[6] if len(words) > 6 else None
        watches = query.get("watch") == "true" or query.get("watch") == "1"
        verb = "patch" if method == "PATCH" else "watch" if watches else "get" if name else "list"
        self.cluster.asked.add((resource, verb))
        kind = (group, resource)
        verbs = [verb]
        if verb == "patch" and name not in self.cluster.objects.get(kind, {}):
            verbs.append("create")  # server-side apply of what is not there yet
        has_token = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if not has_token or not all(self.cluster.allows(group, resource, each) for each in verbs):
            self.cluster.refused.append(f"{verb} {self.path}")
            self._send(403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403})
        elif words[4] != self.cluster.namespace or kind not in KINDS:
            self._send(404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404})
        elif verb == "patch":
            assert self.headers["content-type"] == "application/apply-patch+yaml"
            self._send(200, self.cluster.put(kind, str(name), json.loads(body)))
        elif verb == "watch":
            self._watch(kind, int(query.get("resourceVersion") or 0), query.get("labelSelector", ""))
        else:
            self._list(kind, query.get("labelSelector", ""))

    def _list(self, kind: tuple[str, str], selector: str) -> None:
        version, name = KINDS[kind]
        with self.cluster.changed:
            items = [d for d in self.cluster.objects.get(kind, {}).values() if _fits(d, selector)]
            head = {"resourceVersion": str(self.cluster.version)}
        self._send(
            200,
            {"apiVersion": f"{kind[0]}/{version}", "kind": f"{name}List", "metadata": head, "items": items},
        )

    def _watch(self, kind: tuple[str, str], since: int, selector: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.cluster.is_over:
                with self.cluster.changed:
                    new = [(v, e) for v, k, e in self.cluster.events if v > since and k == kind]
                    if not new:
                        self.cluster.changed.wait(1)
                for since, event in new:  # noqa: B007
                    if _fits(event["object"], selector):
                        line = json.dumps(event).encode() + b"\n"
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                        self.wfile.flush()
        self.close_connection = True

    def _send(self, status: int, body: Document) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _fits(document: Document, selector: str) -> bool:
    labels = document["metadata"].get("labels", {})
    return all(
        labels.get(n) == v for n, _, v in (word.partition("=") for word in selector.split(",") if word)
    )


@contextlib.contextmanager
def cluster(folder: Path, namespace: str, rules: list[Document]) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and the kubeconfig with which to reach it."""
    made = Cluster(namespace, rules)
    handler = type("Handler", (_Handler,), {"cluster": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threads = [
        threading.Thread(target=server.serve_forever, daemon=True),
        threading.Thread(target=made.watch_pods, daemon=True),
    ]
    for thread in threads:
        thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "pod", "namespace": namespace}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "pod", "user": {"token": TOKEN}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    try:
        yield made, path
    finally:
        made.is_over = True
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join(5)
