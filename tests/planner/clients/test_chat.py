"""The chat client against a small OpenAI-compatible server whose model is the scripted planner."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dayshift.engine.api import FinishReason
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.planner.clients.chat import ChatClient
from dayshift.planner.clients.scripted import ScriptedPlanner
from dayshift.planner.errors import PlannerCallError
from dayshift.planner.memory import MemoryArm
from dayshift.planner.protocol import COMMAND_SCHEMA, REVIEW_SCHEMA
from dayshift.planner.scores import compute_scores
from dayshift.types import Outcome

QUESTION = {"at": 1.0, "schema": COMMAND_SCHEMA, "max_tokens": 96}
FAILED = {"r0-1.1.1-w1": Outcome.FAILED, "r0-1.1.1-w2": Outcome.FAILED}


class ChatServer(HTTPServer):
    """Counts a word as a token. Stateless: every request is answered from its own messages alone."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ChatHandler)
        self.requests = []
        self.headers = []
        self.answers = []  # (status, body) to give instead of the next answers
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"

    def complete(self, request):
        oracle = ScriptedPlanner(remembers=True)
        messages = [m["content"] for m in request["messages"] if m["role"] == "user"]
        replies = [oracle.ask(message, at=0.0, schema={}, max_tokens=1).text for message in messages]
        num_words = sum(len(m["content"].split()) for m in request["messages"])
        return {
            "choices": [{"message": {"role": "assistant", "content": replies[-1]}, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": num_words,
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": 3},
            },
        }


class ChatHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        assert isinstance(server, ChatServer)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, request))
        server.headers.append(self.headers)
        status, body = 200, None
        if server.answers:
            status, body = server.answers.pop(0)
        if body is None:
            body = json.dumps(server.complete(request))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format, *args):
        """Nothing on the test's output."""


@pytest.fixture
def server():
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def connect(server):
    clients = []

    def connect(arm=MemoryArm.FULL, **options):
        client = ChatClient(server.base_url, arm=arm, model="m", system="Lead.", **options)
        clients.append(client)
        client.open("r0", ())
        return client

    yield connect
    for client in clients:
        client.close()


def test_the_full_arm_resends_everything_and_remembers(rig, server, connect):
    r = rig(planner=connect(), outcomes=FAILED)
    r.run()
    assert compute_scores([r.records]).review_answers_correct == 2
    talk = [{"role": "system", "content": "Lead."}]
    for exchange, (path, request) in zip(r.records.exchanges, server.requests, strict=True):
        assert path == "/v1/chat/completions"
        assert request["messages"] == [*talk, {"role": "user", "content": exchange.message}]
        talk += [
            {"role": "user", "content": exchange.message},
            {"role": "assistant", "content": exchange.reply},
        ]
        schema = REVIEW_SCHEMA if exchange.step is None else COMMAND_SCHEMA
        assert request["response_format"]["json_schema"]["schema"] == schema


def test_the_off_arm_sends_the_system_prompt_and_the_message(server, connect):
    client = connect(MemoryArm.OFF)
    for message in ("Result: done.", "Review of shift 1: ."):
        client.ask(message, **QUESTION)
        assert server.requests[-1][1]["messages"] == [
            {"role": "system", "content": "Lead."},
            {"role": "user", "content": message},
        ]


def test_the_history_is_taken_up_again(rig, server, connect):
    r = rig(planner=connect(), outcomes=FAILED)
    r.run()
    client = connect()
    client.open("r0", r.records.exchanges[:4])
    client.ask("Review of shift 1: .", **QUESTION)
    contents = [m["content"] for m in server.requests[-1][1]["messages"]]
    talk = [text for e in r.records.exchanges[:4] for text in (e.message, e.reply)]
    assert contents == ["Lead.", *talk, "Review of shift 1: ."]


def test_sampling_and_extra_fields_are_sent(server, connect):
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    connect(temperature=0.5, seed=7, api_key="key", extra_body=extra).ask("Result: done.", **QUESTION)
    _, request = server.requests[0]
    sent = {key: request[key] for key in ("model", "temperature", "seed", "max_tokens", *extra)}
    assert sent == {"model": "m", "temperature": 0.5, "seed": 7, "max_tokens": 96, **extra}
    assert server.headers[0]["Authorization"] == "Bearer key"


def test_tokens_are_computed_or_reused_as_the_server_says(connect):
    ledger = connect().ask("Review of shift 1: five words more.", **QUESTION).ledger
    assert (ledger.computed, ledger.reused, ledger.generated) == (5, 3, 1)


@pytest.mark.parametrize(
    ("finish_reason", "expected"),
    [("length", FinishReason.LENGTH), ("content_filter", FinishReason.ERROR)],
)
def test_finish_reasons(server, connect, finish_reason, expected):
    body = {
        "choices": [{"message": {"content": None}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 0},
    }
    server.answers = [(200, json.dumps(body))]
    reply = connect().ask("Result: done.", **QUESTION)
    assert (reply.text, reply.finish_reason) == ("", expected)


@pytest.mark.parametrize(
    ("answer", "error", "is_transient"),
    [
        ((500, "broken"), "answered 500: 'broken'", True),
        ((429, "slow down"), "answered 429", True),
        ((400, "context too long\nsorry"), r"answered 400: 'context too long\\nsorry'", False),
        ((200, "<html>"), "not JSON", False),
        ((200, "{}"), "not a chat completion", False),
        ((200, "[]"), "not a chat completion", False),
    ],
)
def test_errors_are_one_line_and_leave_the_history_as_it_was(server, connect, answer, error, is_transient):
    client = connect()
    server.answers = [answer]
    with pytest.raises(PlannerCallError, match=error) as caught:
        client.ask("Result: done.", **QUESTION)
    assert "\n" not in str(caught.value)
    assert caught.value.is_transient == is_transient
    assert client.ask("Result: done.", **QUESTION).finish_reason is FinishReason.STOP
    assert len(server.requests[-1][1]["messages"]) == 2


def test_a_server_that_does_not_answer_and_one_that_is_gone():
    with ChatServer() as gone:
        pass
    with ChatServer() as silent:  # accepts connections, never serves them
        for url, error in ((silent.base_url, "ReadTimeout"), (gone.base_url, "ConnectError")):
            client = ChatClient(url, arm=MemoryArm.OFF, model="m", system="Lead.", timeout_s=0.1)
            with pytest.raises(PlannerCallError, match=error) as caught:
                client.ask("Result: done.", **QUESTION)
            assert caught.value.is_transient
            client.close()


def test_a_server_that_comes_back_is_asked_again(rig, server, connect):
    server.answers = [(503, "loading")] * 2
    r = rig(planner=connect(), outcomes=FAILED)
    r.rules = replace(r.rules, planner_retry_delays_s=(0.0, 0.0))
    r.run()
    assert r.records.exchanges[0].num_retries == 2
    assert compute_scores([r.records]).review_answers_correct == 2


def test_a_session_arm_is_refused():
    with pytest.raises(ValueError, match="needs a session"):
        ChatClient("http://127.0.0.1:9/v1", arm=MemoryArm.WINDOW, model="m", system="Lead.")


def test_on_our_own_server_the_ledger_is_the_engines(model_dir):
    config = EngineConfig(model=str(model_dir), device="cpu", load_format="dummy", kv_cache_bytes=1 << 24)
    with running_server(config, ServerOptions(port=0, in_process=True, model_name="m")) as url:
        client = ChatClient(f"{url}/v1", arm=MemoryArm.FULL, model="m", system="Lead.")
        first = client.ask("Result: done.", at=1.0, schema=COMMAND_SCHEMA, max_tokens=12)
        second = client.ask("Result: done.", at=2.0, schema=COMMAND_SCHEMA, max_tokens=12)
        client.close()
    assert first.finish_reason is FinishReason.LENGTH
    assert first.text.startswith("{")
    assert first.ledger.prefill_ms > 0
    assert second.ledger.generated == 12
    assert second.ledger.computed + second.ledger.reused > first.ledger.computed + len(
        first.text
    )  # the history is sent again
