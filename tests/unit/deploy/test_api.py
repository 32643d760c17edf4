import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deploy.api import ChatAnswer, RouterApi, first_to_explain
from deploy.errors import RequestFailed
from deploy.show import drained_text, report_lines, size

USAGE = {
    "prompt_tokens": 499,
    "completion_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 480},
    "headrace": {
        "path": "remote",
        "prefill": {"node": "p0", "attention_hit_tokens": 496, "state_hit_tokens": 480, "computed_tokens": 19},
        "decode": {
            "node": "d0",
            "attention_hit_tokens": 448,
            "state": "received",
            "drafted_tokens": 6,
            "accepted_tokens": 4,
        },
        "transfer": {"attention_tokens": 51, "attention_bytes": 52224, "state_bytes": 188416, "seconds": 0.0021},
        "checkpoints": [480],
        "migrations": 0,
    },
}


DRAINED = {"node": "d 0", "moved": 3, "recomputed": 0, "ended": 1, "seconds": 0.123}


def piece(text):
    return {"choices": [{"delta": {"content": text}}]}


@pytest.fixture
def router():
    """Answers every POST with `events` (or with `status` and `body`), over real HTTP; keeps what was asked."""

    class Router(BaseHTTPRequestHandler):
        events = ()
        status, body = 200, b""
        asked = None

        def do_POST(self):
            Router.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(Router.status)
            self.end_headers()
            self.wfile.write(Router.body)
            for event in Router.events:
                self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

        def do_GET(self):
            Router.asked = self.path
            self.send_response(Router.status)
            self.end_headers()
            self.wfile.write(Router.body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Router)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds until it notices its end
    thread.start()
    Router.url = f"http://127.0.0.1:{server.server_port}"
    yield Router
    server.shutdown()
    thread.join(10)
    server.server_close()


def ask(router, heard=None):
    on_text = [].append if heard is None else heard.append
    return RouterApi(router.url).chat([{"role": "user", "content": "hello"}], max_tokens=5, on_text=on_text)


def test_an_answer_arrives_piece_by_piece_with_its_report(router):
    router.events = (piece(""), piece("The "), piece("code"), {"choices": [], "usage": USAGE}, "[DONE]")
    heard = []
    answer = ask(router, heard)
    assert heard == ["The ", "code"]
    assert (answer.text, answer.report) == ("The code", USAGE["headrace"])
    assert 0 < answer.first_token_s <= answer.total_s
    assert router.asked["headrace"] == {"report": True}
    assert router.asked["messages"] == [{"role": "user", "content": "hello"}]


def test_a_call_of_a_tool_is_put_together(router):
    def part(index, **function):
        return {"choices": [{"delta": {"tool_calls": [{"index": index, "function": function}]}}]}

    router.events = (
        part(0, name="ring", arguments=""),
        part(0, arguments='{"hour": '),
        part(0, arguments="7}"),
        part(1, name="add", arguments="{}"),
        "[DONE]",
    )
    tools = [{"type": "function", "function": {"name": "ring"}}]
    answer = RouterApi(router.url).chat([], max_tokens=5, on_text=[].append, tools=tools)
    assert answer.calls == (("ring", '{"hour": 7}'), ("add", "{}"))
    assert router.asked["tools"] == tools


def test_an_answer_that_breaks_off_is_an_error(router):
    router.events = (piece("The "),)
    with pytest.raises(RequestFailed, match="before the answer's end"):
        ask(router)


def test_an_error_in_the_stream_is_an_error(router):
    router.events = (piece("The "), {"error": {"message": "no node is left"}}, "[DONE]")
    with pytest.raises(RequestFailed, match="no node is left"):
        ask(router)


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error": {"message": "too long"}}', "HTTP 400: too long"), (b"<html>", "HTTP 400: <html>")],
)
def test_a_refused_request_says_why(router, body, message):
    router.status, router.body = 400, body
    with pytest.raises(RequestFailed, match=message):
        ask(router)


def test_a_request_is_explained_by_the_router_that_knows_it(router):
    router.body = b'{"requests": []}'
    apis = [RouterApi("http://127.0.0.1:1"), RouterApi(router.url)]
    assert first_to_explain(apis, "cmpl-a/b") == {"requests": []}
    assert router.asked == "/cluster/requests/cmpl-a%2Fb/explain"
    router.status, router.body = 404, b'{"error": {"message": "no routing decision"}}'
    with pytest.raises(RequestFailed, match=r"does not answer.*; HTTP 404: no routing decision"):
        first_to_explain(apis, "cmpl-1")


def test_no_router_is_an_error_and_has_no_nodes():
    api = RouterApi("http://127.0.0.1:1")
    with pytest.raises(RequestFailed, match=r"does not answer"):
        api.cluster()
    assert api.registered_nodes() == set()


def test_a_report_follows_the_request():
    lines = report_lines(ChatAnswer("", USAGE, 0.25, 0.5))
    assert lines == [
        ("tokens", "499 in the prompt, 480 of them cached; 11 generated"),
        ("prefill p0", "attention hit 496, state hit 480, computed 19 tokens"),
        ("transfer", "attention 51 KiB (51 tokens), state 184 KiB, 2.1 ms"),
        ("decode d0", "prefilled remotely, attention hit 448, state received, 4 of 6 drafts accepted"),
        ("time", "first token 250 ms, whole answer 500 ms"),
    ]


def test_a_local_prefill_has_no_hand_over_to_report():
    headrace = {**USAGE["headrace"], "path": "local", "prefill": None, "transfer": None}
    lines = report_lines(ChatAnswer("", {**USAGE, "headrace": headrace}, None, 0.5))
    assert [name for name, _ in lines] == ["tokens", "decode d0", "time"]
    assert lines[1][1].startswith("prefilled here")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (188416, "184 KiB"), (5 << 40, "5120 GiB")]
)
def test_sizes_are_for_people(num_bytes, text):
    assert size(num_bytes) == text


def test_a_drain_says_what_has_become_of_the_requests(router):
    router.body = json.dumps(DRAINED).encode()
    report = RouterApi(router.url).drain("d 0", timeout_s=5.0, keep=True)
    assert router.asked == {"timeout_s": 5.0, "keep": True}
    assert drained_text(report) == ("d 0 is drained: 3 requests moved, 0 began again elsewhere, 1 ended; 0.12 s")


def test_a_drain_that_is_refused_is_one_message(router):
    router.status, router.body = 409, b'{"error": {"message": "no other node decodes than d0"}}'
    with pytest.raises(RequestFailed, match="HTTP 409: no other node decodes than d0"):
        RouterApi(router.url).drain("d0", timeout_s=5.0, keep=True)
