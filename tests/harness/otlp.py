"""A receiver of OpenTelemetry's traces for a test, over gRPC and over HTTP.

Run as `python -m harness.otlp FILE` (a process of its own: gRPC's threads do not go with forks). It writes
its two ports as one JSON line to its output, and every span that comes as one to FILE.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

from harness.waiting import until

SPANS, LOGS = "/v1/traces", "/v1/logs"


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    span: str
    parent: str
    """Empty for the first of a trace."""
    attributes: dict[str, Any]
    seconds: float
    failed: bool


@dataclass(frozen=True)
class Receiver:
    """The test's side."""

    file: Path
    grpc: str
    http: str

    def spans(self) -> list[Span]:
        lines = self.file.read_text().splitlines(keepends=True)
        return [Span(**json.loads(line)) for line in lines if line.endswith("\n")]

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in self.spans() if span.trace == trace]

    def wait(self, trace: str, *wanted: tuple[str, str], seconds: float = 60.0) -> list[Span]:
        """Everything of one trace once spans of these services and names are there, and those above them."""

        def are_there() -> bool:
            found = self.of_trace(trace)
            above = {span.parent for span in found if span.parent} - {span.span for span in found}
            names = {(span.service, span.name) for span in found}
            return set(wanted) <= names and len(above) <= 1  # the caller's own is not sent here

        until(f"spans {wanted} of trace {trace}", are_there, seconds, 0.1)
        return self.of_trace(trace)


@contextlib.contextmanager
def receiver(folder: Path) -> Iterator[Receiver]:
    file = folder / "spans.jsonl"
    file.touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.otlp", str(file)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            yield Receiver(file, f"http://127.0.0.1:{ports['grpc']}", f"http://127.0.0.1:{ports['http']}")
        finally:
            process.kill()


# --- its own side --------------------------------------------------------------------------------------


class Writer:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def take(self, request: Any) -> None:
        with self._lock:
            for group in request.resource_spans:
                service = _values(group.resource.attributes).get("service.name", "")
                for scope in group.scope_spans:
                    for span in scope.spans:
                        self._file.write(json.dumps(_shown(service, span)) + "\n")
            self._file.flush()


def _shown(service: str, span: Any) -> dict[str, Any]:
    return {
        "service": service,
        "name": span.name,
        "trace": span.trace_id.hex(),
        "span": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "attributes": _values(span.attributes),
        "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        "failed": span.status.code == 2,
    }


def _values(attributes: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value", "") for one in attributes
    }


def over_grpc(writer: Writer) -> int:
    """Takes no logs, as many receivers of traces: the runtime sends its own too."""
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            writer.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _kept.append(server)
    return int(port)


def over_http(writer: Writer) -> int:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == SPANS:
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                writer.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path in (SPANS, LOGS) else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    _kept.append(server)
    return int(server.server_address[1])


_kept: list[Any] = []


def main() -> None:
    with open(sys.argv[1], "a") as file:
        writer = Writer(file)
        print(json.dumps({"grpc": over_grpc(writer), "http": over_http(writer)}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
