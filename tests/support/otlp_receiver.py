"""An OTLP receiver over HTTP on loopback, that keeps the spans which it gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.patience import PATIENCE_S


@dataclass
class Receiver:
    """Spans by the service that has sent them, in the order in which they came."""

    url: str
    came: threading.Condition = field(default_factory=threading.Condition)
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def take(self, message: ExportTraceServiceRequest) -> None:
        with self.came:
            for resource in message.resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
            self.came.notify_all()

    def wait_for(self, count: int) -> list[tuple[str, Span]]:
        """At least so many spans, once they are there."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.spans) >= count, PATIENCE_S), self.spans
            return list(self.spans)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """A receiver while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces" and "Content-Encoding" not in self.headers
            receiver.take(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
