"""A stand-in for llama-server that keeps what it received and misbehaves when a request's header says so."""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HELPERS = ("/apply-template", "/tokenize", "/props")


class FakeUpstream(ThreadingHTTPServer):
    """Counts as `n_tokens`, renders as ChatML. `X-Scenario`: plain, echo (of the last text), slow, dying,
    dying-stream, stream, endless-stream, usage-stream."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: deque[tuple[str, str, dict[str, str], bytes]] = deque(maxlen=200)
        self.gone = threading.Event()
        """Set when a client left during the slow scenario."""
        self.go_on = threading.Event()
        """Lets a stream go on behind its first event."""
        self.absent: set[str] = set()
        """Paths that it does not have."""
        self.n_ctx = 100_000

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def generations(self) -> list[tuple[str, str, dict[str, str], bytes]]:
        """What was received but for helpers."""
        return [entry for entry in self.received if entry[1] not in HELPERS]


@contextmanager
def fake_upstream() -> Iterator[FakeUpstream]:
    server = FakeUpstream()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def n_tokens(text: str) -> int:
    """A byte is a token, and so is a marker."""
    return len(re.sub(rb"<\|im_(start|end)\|>", b"0", text.encode("utf-8", "surrogatepass")))


def render(messages: list[dict[str, Any]]) -> str:
    """As ChatML."""
    turns = [f"<|im_start|>{m['role']}\n{m.get('content') or json.dumps(m)}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeUpstream

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_DELETE(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(body)

    def _answer(self, body: bytes) -> None:
        self.body = body
        headers = {k.lower(): v for k, v in self.headers.items()}
        self.server.received.append((self.command, self.path, headers, body))
        path = self.path.partition("?")[0]
        if path in self.server.absent:
            self._json({"detail": "Not Found"}, 404)
        elif path in ("/apply-template", "/tokenize"):
            try:
                value = json.loads(body)
                if path == "/tokenize":
                    self._json({"tokens": [0] * n_tokens(value["content"])})
                else:
                    self._json({"prompt": render(value["messages"])})
            except (ValueError, TypeError, KeyError, AttributeError):
                self._json({"error": {"code": 400, "message": "bad body", "type": "invalid_request_error"}}, 400)
        elif path == "/props":
            self._json({"default_generation_settings": {"n_ctx": self.server.n_ctx}})
        elif path == "/missing":
            self._json({"error": {"code": 404, "message": "no such thing", "type": "not_found_error"}}, 404)
        else:
            getattr(self, "_" + self.headers.get("X-Scenario", "plain").replace("-", "_"))()

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Upstream", "yes")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _plain(self) -> None:
        self._json({"id": "1", "choices": [], "usage": {"prompt_tokens": 1}, "odd": "spacing"})

    def _echo(self) -> None:
        body = json.loads(self.body)
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        self._json({"echo": text[-64:], "usage": {"prompt_tokens": len(text)}})

    def _slow(self) -> None:
        self.connection.settimeout(20)
        try:
            if self.connection.recv(1) == b"":
                self.server.gone.set()
        except OSError:
            self.server.gone.set()
        self.close_connection = True

    def _dying(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"half')
        self._reset()

    def _dying_stream(self) -> None:
        self._begin_stream()
        self._event(b'data: {"choices":[]}\n\n')
        time.sleep(0.1)
        self._reset()

    def _stream(self) -> None:
        self._begin_stream()
        self._event(b'data: {"n":1}\n\n')
        if not self.server.go_on.wait(10):
            return
        self._event(b': ping\n\ndata: {"n":')
        self._event(b"2}\n\ndata: [DONE]\n\n")
        self._event(b"")

    def _endless_stream(self) -> None:
        self._begin_stream()
        try:
            while True:
                self._event(b'data: {"n":1}\n\n')
                time.sleep(0.05)
        except OSError:
            self.server.gone.set()
        self.close_connection = True

    def _usage_stream(self) -> None:
        self._begin_stream()
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":5}}\n\n'
        self._event(b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}]}\n\n' + usage[:20])
        self._event(usage[20:] + b"data: [DONE]\n\n")
        self._event(b"")

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
