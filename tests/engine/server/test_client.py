"""What the client makes of servers that are down, slow, foreign or broken."""

import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dayshift.engine.api import (
    EngineError,
    FinishReason,
    InvalidRequestError,
    Message,
    SamplingParams,
    SessionConfig,
    TurnRequest,
)
from dayshift.engine.client import (
    DayshiftClient,
    EngineTimeoutError,
    EngineUnreachableError,
    UnauthorizedError,
)
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.tokenizer import Tokenizer


@contextmanager
def answering(*pieces: bytes, then_hangs: bool = False) -> Iterator[str]:
    """A server that says these bytes to the first connection, whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                for piece in pieces:
                    connection.sendall(piece)
                if then_hangs:
                    done.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        thread.join()


def one_turn(session_id: str = "s") -> TurnRequest:
    return TurnRequest(
        request_id=uuid.uuid4().hex, session_id=session_id, at=0, messages=(Message("user", "hi"),)
    )


def test_a_server_that_is_down_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        DayshiftClient(f"http://127.0.0.1:{port}") as client,
        pytest.raises(EngineUnreachableError, match=f"no engine answers at http://127.0.0.1:{port}"),
    ):
        client.session("s")


def test_a_server_that_does_not_answer_is_a_timeout():
    with (
        answering(then_hangs=True) as url,
        DayshiftClient(url, timeout_s=0.2) as client,
        pytest.raises(EngineTimeoutError, match=r"within 0\.2 s"),
    ):
        client.turn(one_turn())


def test_a_connection_that_breaks_is_unreachable():
    with (
        answering(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{") as url,
        DayshiftClient(url) as client,
        pytest.raises(EngineUnreachableError, match="the connection broke"),
    ):
        client.turn(one_turn())


def test_a_stream_without_its_end_is_not_taken_for_a_whole_reply():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    piece = b'data: {"request_id":"q","text":"half","error":null}\n\n'
    with answering(head, piece) as url, DayshiftClient(url) as client:
        chunks = client.stream_turn(one_turn())
        assert next(chunks).text == "half"
        with pytest.raises(EngineUnreachableError, match=r"ended before the reply did|the connection broke"):
            next(chunks)


def test_a_foreign_server_is_not_taken_for_an_engine():
    with (
        answering(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\n\r\noops!") as url,
        DayshiftClient(url) as client,
        pytest.raises(EngineError, match="502"),
    ):
        client.sessions()


def test_the_key_is_sent(engine_config: EngineConfig):
    options = ServerOptions(port=0, api_key="secret", in_process=True)
    with running_server(engine_config, options) as url:
        with DayshiftClient(url, api_key="secret") as client:
            assert client.sessions() == []
        with DayshiftClient(url, api_key="guess") as client, pytest.raises(UnauthorizedError):
            client.sessions()


def test_generate_and_chat_give_whole_results(dayshift: DayshiftClient, tiny_model_dir):
    tokenizer = Tokenizer(tiny_model_dir)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, seed=4, top_p=0.9, top_k=40)
    by_text = dayshift.generate("put the bowl", sampling)
    by_ids = dayshift.generate(tokenizer.encode("put the bowl"), sampling)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == tokenizer.decode(by_text.token_ids)
    assert by_text.finish_reason is FinishReason.LENGTH
    assert by_text.ledger.generated == 9
    chat = dayshift.chat([Message("user", "hi")], SamplingParams(json_schema={"const": "yes"}))
    assert (chat.text, chat.finish_reason) == ('"yes"', FinishReason.STOP)


def test_log_probabilities_come_with_turns(dayshift: DayshiftClient):
    session_id = dayshift.open_session(SessionConfig(window=200)).session_id
    request = TurnRequest(
        request_id=uuid.uuid4().hex,
        session_id=session_id,
        at=0,
        messages=(Message("user", "hi"),),
        sampling=SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True),
    )
    reply = dayshift.turn(request)
    assert tuple(entry.token_id for entry in reply.logprobs) == reply.token_ids
    assert all(entry.top[0] == (entry.token_id, pytest.approx(entry.logprob)) for entry in reply.logprobs)
    dayshift.close_session(session_id)
    with pytest.raises(InvalidRequestError, match="session turns only"):
        dayshift.generate("x", SamplingParams(logprobs=1))


@pytest.mark.parametrize("session_id", ["", "a/b", "../x"])
def test_a_session_id_cannot_change_the_route(dayshift: DayshiftClient, session_id: str):
    with pytest.raises(InvalidRequestError, match="not allowed"):
        dayshift.close_session(session_id)


def test_health(dayshift: DayshiftClient):
    dayshift.check_health()
