"""What passes through the proxy, byte for byte, and what happens when either side leaves or misbehaves."""

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_tools import Daemon, running_daemon
from fake_upstream import HELPERS, FakeUpstream, fake_upstream, n_tokens, render
from http_tools import eventually
from laguna_gguf.daemon.proxy.answers import with_timings

CHAT = "/v1/chat/completions"
LONG = "The river runs by the old mill and the tower. " * 30
LONG_CHAT = {"messages": [{"role": "user", "content": LONG + "Where is the tower?"}]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, qwen35: Path) -> Iterator[tuple[FakeUpstream, Daemon]]:
    arguments = ["--prefill-drafter", str(qwen35), "--prefill-threshold", "500", "--prefill-keep-ratio", "0.3"]
    folder = tmp_path_factory.mktemp("wire")
    with fake_upstream() as upstream, running_daemon(folder, *arguments, upstream=upstream.url) as daemon:
        yield upstream, daemon
        assert "secret-key" not in daemon.log.read_text()


@pytest.fixture
def upstream(shared: tuple[FakeUpstream, Daemon]) -> FakeUpstream:
    shared[0].received.clear()
    shared[0].gone.clear()
    shared[0].go_on.clear()
    return shared[0]


@pytest.fixture
def daemon(shared: tuple[FakeUpstream, Daemon]) -> Daemon:
    return shared[1]


KEYS = {"Authorization": "Bearer secret-key", "X-Api-Key": "secret-key", "X-Odd": "a  b", "Content-Type": "text/odd"}


def test_short_bodies_pass_byte_for_byte(upstream: FakeUpstream, daemon: Daemon) -> None:
    bodies = [
        b'{ "messages":[{"role":"user","content":"h\\u00e9"}],  "pflash": {"session":"s"}, "session_id":"x"}\n',
        b'{"messages": "not a list"}',
        b"not json \xff\xfe",
        b"[" * 5000,
        b"",
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    ]
    for body in bodies:
        upstream.received.clear()
        answer = daemon.request("POST", CHAT + "?a=%2Fb&c", body, KEYS)
        assert answer.data == b'{"id": "1", "choices": [], "usage": {"prompt_tokens": 1}, "odd": "spacing"}'
        assert answer.status == 200 and answer.headers["x-upstream"] == "yes"
        [(method, path, headers, received)] = upstream.received
        assert (method, path, received) == ("POST", CHAT + "?a=%2Fb&c", body)
        assert all(headers[name.lower()] == value for name, value in KEYS.items())


def test_other_paths_pass(upstream: FakeUpstream, daemon: Daemon) -> None:
    big = LONG.encode() * 20
    cases = [("GET", "/v1/models", None), ("DELETE", "/slots/1", None), ("POST", "/v1/embeddings", big)]
    cases += [("POST", "/tokenize?x=1", b'{"content":"a"}'), ("GET", "/odd/%C3%A9%2F..%2Fx?y=%20", None)]
    for method, path, body in cases:
        upstream.received.clear()
        assert daemon.request(method, path, body, KEYS).status == 200
        [(received_method, received_path, headers, received)] = upstream.received
        assert (received_method, received_path, received) == (method, path, body or b"")
        assert headers["authorization"] == "Bearer secret-key"
    daemon.request("GET", "/missing").refused(404, "no such thing")


def test_a_connection_serves_many_requests(upstream: FakeUpstream, daemon: Daemon) -> None:
    """The next one may come as soon as the body of the answer is there."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    with daemon.tcp() as connection, connection.makefile("rb") as answers:
        for number in range(300):
            connection.sendall(head)
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n", number
            fields = dict(line.split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            answers.read(int(fields[b"content-length"]))
        connection.sendall(head * 3)  # pipelined
        for _ in range(3):
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            fields = dict(line.split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            answers.read(int(fields[b"content-length"]))


@pytest.mark.parametrize(
    ("target", "arrives"),
    [
        ("/a//b/../c?d=%20&e", None),
        ("//v1/./models", None),
        ('/odd/{}"<>`|', None),
        ("http://elsewhere/v1/models?x", "/v1/models?x"),
        ("HTTPS://elsewhere", "/"),
    ],
)
def test_targets_are_passed_as_they_are(
    upstream: FakeUpstream, daemon: Daemon, target: str, arrives: str | None
) -> None:
    with daemon.tcp(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert upstream.received[0][1] == (arrives or target).replace("//v1", "/v1", 1)  # the stand-in's own doing


@pytest.mark.parametrize("request_line", ["CONNECT host:80", "GET @evil/", "GET x", "GET ftp://host/"])
def test_targets_that_are_no_paths(upstream: FakeUpstream, daemon: Daemon, request_line: str) -> None:
    with daemon.tcp(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400") and not upstream.received


def test_headers_of_one_connection_stay_there(upstream: FakeUpstream, daemon: Daemon) -> None:
    daemon.request("GET", "/v1/models", None, {"Connection": "close, X-Hop", "X-Hop": "1", "X-Other": "2"})
    headers = upstream.received[0][2]
    assert "x-hop" not in headers and headers["x-other"] == "2"


def test_helpers_are_asked_with_the_clients_headers(upstream: FakeUpstream, daemon: Daemon) -> None:
    given = {"CF-Access-Client-Id": "me", "Range": "bytes=0-1", "Content-Type": "text/odd"}
    assert daemon.request("POST", CHAT, LONG_CHAT | {"model": "small"}, given).status == 200
    helpers = [entry for entry in upstream.received if entry[1] in HELPERS]
    assert {entry[1] for entry in helpers} == set(HELPERS)
    for _, path, headers, body in helpers:
        assert headers["cf-access-client-id"] == "me" and "range" not in headers
        assert path == "/props" or (headers["content-type"], json.loads(body)["model"]) == ("application/json", "small")


def test_the_upstream_servers_context_may_change(upstream: FakeUpstream, daemon: Daemon) -> None:
    try:
        upstream.n_ctx = 60
        daemon.request("POST", CHAT, LONG_CHAT).refused(400, "60")
    finally:
        upstream.n_ctx = 100_000
    assert daemon.request("POST", CHAT, LONG_CHAT).status == 200


def test_numbers_that_are_too_large(upstream: FakeUpstream, daemon: Daemon) -> None:
    body = json.dumps(LONG_CHAT).replace("{", '{"x": 1e400, ', 1).encode()
    assert daemon.request("POST", CHAT, body).status == 200
    assert upstream.generations()[0][3] == body  # it is the upstream server's to refuse
    assert with_timings(b'{"usage": {"prompt_tokens": 1e400}}', {}) == b'{"usage": {"prompt_tokens": 1e400}}'


def test_chunked_bodies(upstream: FakeUpstream, daemon: Daemon) -> None:
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with daemon.tcp(head.encode() + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert upstream.received[0][3] == b"abcdefg"


def test_a_long_chat_is_rewritten(upstream: FakeUpstream, daemon: Daemon) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": LONG, "tool_call_id": "1"},
        {"role": "user", "content": "Where is the tower?"},
    ]
    messages[1]["content"] = LONG
    body = {"messages": messages, "stream": False, "odd": [1.5, "é"], "tools": [{"a": 1}], "session_id": "s"}
    answer = daemon.request("POST", CHAT, body | {"pflash": {"keep": 0.2}}, KEYS)
    timings = answer.json["usage"]["timings"]["pflash"]
    assert answer.json["usage"]["prompt_tokens"] == 1 and timings["view"]["mode"] == "fresh"
    assert 0 < timings["compressed_tokens"] < timings["prompt_tokens"] == n_tokens(render(messages))
    assert timings["keep_ratio"] == pytest.approx(0.2)
    [(_, path, headers, received)] = upstream.generations()
    assert path == CHAT and headers["authorization"] == "Bearer secret-key" and headers["x-odd"] == "a  b"
    sent = json.loads(received)
    assert {k: v for k, v in sent.items() if k != "messages"} == {
        "stream": False, "odd": [1.5, "é"], "tools": [{"a": 1}]
    }  # fmt: skip
    assert len(sent["messages"]) == 5 and [m["role"] for m in sent["messages"]] == [m["role"] for m in messages]
    assert sent["messages"][0] == messages[0] and sent["messages"][4] == messages[4]
    assert sent["messages"][2] == messages[2] and sent["messages"][3]["tool_call_id"] == "1"
    assert n_tokens(render(sent["messages"])) == timings["compressed_tokens"]
    for index in (1, 3):
        assert len(sent["messages"][index]["content"]) < len(LONG)
    assert all(headers.get("authorization") == "Bearer secret-key" for _, _, headers, _ in upstream.received)


def test_parts_of_a_content(upstream: FakeUpstream, daemon: Daemon) -> None:
    """A content that is a list. The stand-in shows it as Python does, so line breaks do not stand there as such."""
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": "a line\n" * 20}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "Where is the tower?"}]
    answer = daemon.request("POST", CHAT, {"messages": messages, "pflash": {"on": True, "keep": 0.1}})
    assert answer.status == 200
    sent = json.loads(upstream.generations()[0][3])["messages"][0]["content"]
    assert len(sent[0]["text"]) < len(LONG)
    assert sent[1] == parts[1]


def test_what_a_request_can_ask_for(upstream: FakeUpstream, daemon: Daemon) -> None:
    off = [{"pflash": {"on": False}}, {"pflash": False}, {"pflash": {"off": True}}, {"pflash": {"compression": "off"}}]
    for fields in off:
        upstream.received.clear()
        body = json.dumps(LONG_CHAT | fields).encode()
        assert daemon.request("POST", CHAT, body).status == 200
        assert [entry[3] for entry in upstream.received] == [body]
    short = {"messages": [{"role": "user", "content": "one two three four five six seven eight nine"}]}
    answer = daemon.request("POST", CHAT, short | {"pflash": {"on": True}})
    assert "pflash" in answer.json["usage"]["timings"]
    upstream.received.clear()
    wanted = {"pflash_query": "Where is", "pflash_required": ["The needle is 4711."], "pflash": {"keep": 0.05}}
    haystack = {"messages": [{"role": "user", "content": f"{LONG} The needle is 4711. {LONG} Where is it?"}]}
    answer = daemon.request("POST", CHAT, haystack | wanted)
    sent = json.loads(upstream.generations()[0][3])["messages"][0]["content"]
    assert "The needle is 4711." in sent and "Where is" in sent and len(sent) < 2 * len(LONG)
    assert answer.json["usage"]["timings"]["pflash"]["query_rule"] == "explicit_query_span"
    bad = [
        {"pflash": 3},
        {"pflash": {"keep": 2}},
        {"pflash": {"keep": "x"}},
        {"pflash": {"odd": 1}},
        {"pflash": {"on": 1}},
        {"pflash": {"compression": "max"}},
        {"pflash": {"query": 5}},
        {"pflash_query": "castle"},
        {"pflash_required": [1]},
        {"pflash_required": ["castle"]},
        {"disk_cache_policy": {"compress": True}},
        {"max_tokens": 200_000},
    ]
    upstream.received.clear()
    for fields in bad:
        daemon.request("POST", CHAT, LONG_CHAT | fields).refused(400)
    assert not upstream.generations()


def test_texts(upstream: FakeUpstream, daemon: Daemon) -> None:
    for path in ("/completion", "/v1/completions"):
        upstream.received.clear()
        answer = daemon.request("POST", path, {"prompt": LONG + "Where?", "n_predict": 1})
        timings = answer.json["usage"]["timings"]["pflash"]
        sent = json.loads(upstream.generations()[0][3])
        assert set(sent) == {"prompt", "n_predict"} and sent["prompt"].endswith("Where?")
        assert len(sent["prompt"]) == timings["compressed_tokens"] < timings["prompt_tokens"] == len(LONG) + 6
    for prompt in ([1] * 3000, [LONG, LONG], None):
        upstream.received.clear()
        body = json.dumps({"prompt": prompt, "pad": LONG}).encode()
        daemon.request("POST", "/completion", body)
        assert [entry[3] for entry in upstream.received] == [body]


def test_streams_come_as_they_are_made(upstream: FakeUpstream, daemon: Daemon) -> None:
    for body in (b"{}", json.dumps(LONG_CHAT | {"stream": True}).encode()):
        upstream.go_on.clear()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Scenario: stream\r\nContent-Length: {len(body)}\r\n\r\n"
        with daemon.tcp(head.encode() + body) as connection:
            data = b""
            while b'{"n":1}' not in data:
                data += connection.recv(1000)
            assert b"[DONE]" not in data
            upstream.go_on.set()
            while b"[DONE]" not in data:
                data += connection.recv(1000)
        assert (
            b"text/event-stream" in data
            and b": ping" in data
            and b'{"n":2}' in re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data)
        )


def test_timings_only_in_the_usage_chunk(upstream: FakeUpstream, daemon: Daemon) -> None:
    scenario = {"X-Scenario": "usage-stream"}
    body = LONG_CHAT | {"stream": True}
    assert b"pflash" not in daemon.request("POST", CHAT, body, scenario).data  # nobody asked for a usage
    answer = daemon.request("POST", CHAT, body | {"stream_options": {"include_usage": True}}, scenario)
    first, second, third, rest = answer.data.decode().split("\n\n")
    assert first == 'data: {"choices":[{"delta":{"content":"\\"usage\\""}}]}' and rest == ""
    usage = json.loads(second.removeprefix("data: "))["usage"]
    assert usage["prompt_tokens"] == 5 and usage["timings"]["pflash"]["kept_tokens"] > 0
    assert third == "data: [DONE]"


@pytest.mark.parametrize("scenario", ["slow", "endless-stream"])
@pytest.mark.parametrize("body", [b"{}", json.dumps(LONG_CHAT).encode()])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves(upstream: FakeUpstream, daemon: Daemon, scenario: str, body: bytes, reset: bool) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Scenario: {scenario}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = daemon.tcp(head.encode() + body)
    eventually(lambda: bool(upstream.generations()))
    if scenario == "endless-stream":
        connection.recv(10)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert upstream.gone.wait(6)


def test_an_upstream_that_dies(upstream: FakeUpstream, daemon: Daemon) -> None:
    daemon.request("POST", CHAT, LONG_CHAT, {"X-Scenario": "dying"}).refused(502, "ended in the middle")
    for body in ({}, LONG_CHAT):
        answer = daemon.request("POST", CHAT, body, {"X-Scenario": "dying-stream"})
        events = answer.data.decode().split("\n\n")
        assert answer.status == 200 and events[0] == 'data: {"choices":[]}'
        assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 502
    with pytest.raises(Exception, match=r"IncompleteRead|reset|closed"):
        daemon.request("POST", CHAT, {}, {"X-Scenario": "dying"})
    assert daemon.request("GET", "/v1/models").status == 200


def test_hostile_requests(upstream: FakeUpstream, daemon: Daemon) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
    with daemon.tcp(head + b"Content-Length: 100000000\r\n\r\nabc") as connection:
        data = connection.recv(5000)
        assert data.startswith(b"HTTP/1.1 413") and b'"message"' in data + connection.recv(5000)
    for junk in (b"\x16\x03\x01\x02\x00", b"POST\r\n\r\n", head + b"Content-Length: -1\r\n\r\n", b"\0" * 100):
        with daemon.tcp(junk) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(5000)[:12] in (b"HTTP/1.1 400", b"")
    huge = {"messages": [{"role": "user", "content": "\u0000\ud800" + LONG}]}
    assert daemon.request("POST", CHAT, huge).status == 200  # passed on: it is the upstream server's to refuse
    assert len(upstream.received) == 1
    deep: dict = {}
    for _ in range(300):
        deep = {"a": deep}
    assert daemon.request("POST", CHAT, LONG_CHAT | {"pflash": deep}).status == 400
    assert daemon.request("POST", CHAT, LONG_CHAT | {"messages": [deep, [], 1, {"content": {"a": LONG}}]}).status < 600
    idle = [daemon.tcp(head[: n % len(head)]) for n in range(100)]
    assert daemon.request("GET", "/health").status == 200
    for connection in idle:
        connection.close()
    for _ in range(3):
        threads = [threading.Thread(target=daemon.request, args=("POST", CHAT, LONG_CHAT)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert daemon.request("POST", CHAT, {}).status == 200


def test_five_hundred_idle_connections(upstream: FakeUpstream, daemon: Daemon) -> None:
    begun = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n"
    web = [daemon.tcp([b"", begun, begun + b"\r\n{"][n % 3]) for n in range(250)]
    ipc = [daemon.connect(greet=n % 2 == 0) for n in range(250)]
    assert daemon.request("POST", CHAT, LONG_CHAT).status == 200
    assert daemon.stats()["connections"] >= 250
    for connection in [*web, *ipc]:
        connection.close()
    eventually(lambda: daemon.stats()["connections"] == 1)


def test_own_paths(upstream: FakeUpstream, daemon: Daemon) -> None:
    upstream.received.clear()
    assert daemon.request("GET", "/health").json == {"status": "ok"}
    daemon.request("POST", "/health", b"").refused(405)
    metrics = daemon.request("GET", "/metrics").data.decode()
    assert "pflash_compressions_total" in metrics and "pflash_drafter_ready 1.0" in metrics
    page = daemon.request("GET", "/pflash")
    assert page.headers["content-type"].startswith("text/html") and b"Prompt compression" in page.data
    assert b"http" not in page.data and b"<script" not in page.data and b"river" not in page.data
    daemon.request("GET", "/pflash/999999").refused(404)
    daemon.request("GET", "/pflash/x<script>").refused(404)
    assert not upstream.received


def test_an_absent_upstream_and_errors_that_pass(tmp_path: Path, qwen35: Path) -> None:
    with fake_upstream() as upstream:
        url = upstream.url
    arguments = ["--prefill-drafter", str(qwen35), "--prefill-threshold", "500", "--on-error", "passthrough"]
    with running_daemon(tmp_path, *arguments, upstream=url) as daemon:
        for body in ({}, LONG_CHAT):
            began = time.monotonic()
            daemon.request("POST", CHAT, body).refused(502, "cannot be reached")
            assert time.monotonic() - began < 8
        daemon.request("GET", "/v1/models").refused(502)


def test_passthrough_on_error(tmp_path: Path, qwen35: Path) -> None:
    arguments = ["--prefill-drafter", str(qwen35), "--prefill-threshold", "500", "--on-error", "passthrough"]
    with fake_upstream() as upstream, running_daemon(tmp_path, *arguments, upstream=upstream.url) as daemon:
        body = json.dumps(LONG_CHAT | {"pflash_query": "castle"}).encode()
        assert daemon.request("POST", CHAT, body).status == 200
        assert [entry[3] for entry in upstream.generations()] == [body]
        upstream.received.clear()
        upstream.absent = {"/apply-template"}
        assert daemon.request("POST", CHAT, LONG_CHAT).status == 200
        assert [json.loads(entry[3]) for entry in upstream.generations()] == [LONG_CHAT]


@pytest.mark.parametrize("path", ["/apply-template", "/tokenize"])
def test_an_upstream_that_is_no_llama_server(upstream: FakeUpstream, daemon: Daemon, path: str) -> None:
    upstream.absent = {path}
    try:
        assert daemon.request("POST", CHAT, {"messages": [{"role": "user", "content": "hi"}]}).status == 200
        daemon.request("POST", CHAT, LONG_CHAT).refused(502, f"has no {path} (404")
    finally:
        upstream.absent = set()


def test_an_answer_in_progress_is_finished(tmp_path: Path, qwen35: Path) -> None:
    arguments = ["--prefill-drafter", str(qwen35)]
    with fake_upstream() as upstream, running_daemon(tmp_path, *arguments, upstream=upstream.url) as daemon:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Scenario: stream\r\nContent-Length: 2\r\n\r\n{{}}"
        with daemon.tcp(head.encode()) as connection:
            data = connection.recv(1000)
            daemon.process.terminate()
            eventually(lambda: "ending" in daemon.log.read_text())
            time.sleep(0.3)
            upstream.go_on.set()
            while part := connection.recv(1000):
                data += part
        assert b"[DONE]" in data and daemon.process.wait(10) == 0
