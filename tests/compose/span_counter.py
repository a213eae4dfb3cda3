"""Stands where an OpenTelemetry collector would: takes traces as OTLP over HTTP and shows Prometheus how many spans of each service came."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

_spans: Counter[str] = Counter()


class _Handler(BaseHTTPRequestHandler):
    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Receiver(_Handler):
    """POST /v1/traces."""

    def do_POST(self) -> None:
        assert self.path == "/v1/traces", self.path
        body = self.rfile.read(int(self.headers["Content-Length"]))
        said = ExportTraceServiceRequest.FromString(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        for group in said.resource_spans:
            service = next(each.value.string_value for each in group.resource.attributes if each.key == "service.name")
            _spans[service] += sum(len(scope.spans) for scope in group.scope_spans)
        self.answer(ExportTraceServiceResponse().SerializeToString(), "application/x-protobuf")


class Figures(_Handler):
    """GET /metrics."""

    def do_GET(self) -> None:
        lines = [f'semantide_spans_calls_total{{service_name="{name}"}} {count}' for name, count in sorted(_spans.items())]
        self.answer("".join(f"{line}\n" for line in lines).encode(), "text/plain; version=0.0.4")


if __name__ == "__main__":
    threading.Thread(target=ThreadingHTTPServer(("0.0.0.0", 8889), Figures).serve_forever, daemon=True).start()
    ThreadingHTTPServer(("0.0.0.0", 4318), Receiver).serve_forever()
