"""Answers as server-sent events: pieces that are pending together are written together."""

from contextlib import ExitStack

from starlette.types import Message

from runtime.errors import WorkerLost
from runtime.serving.frontend.requests import Request
from runtime.serving.http.responses import ChatResponse, EventStream, error_event, events
from runtime.serving.messages import Generation, Sampling, Tokens


def request() -> Request:
    return Request("r", Generation(Sampling(16), 0, 1, prompt="x"))


async def parts(asked: Request) -> list[bytes]:
    """The parts of a stream whose pieces are all there after the first."""
    answer, first = ChatResponse("r", "m", 0), Tokens("r", "one", (1,))
    answer.add(first)
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        raise AssertionError

    stream = EventStream(asked, events(answer, asked, first, lambda: None), error_event, ExitStack())
    await stream({"type": "http"}, receive, send)
    return sent[1:-1]  # the start and the end are empty


async def test_pending_pieces_are_written_together() -> None:
    asked = request()
    for piece in (Tokens("r", "two", (2,)), Tokens("r", "three", (3,), "stop")):
        asked.put(piece)
    opening, rest, closing = await parts(asked)
    assert b'"one"' in opening
    assert rest.count(b"data: ") == 2
    assert rest.index(b'"two"') < rest.index(b'"three"')
    assert closing == b"data: [DONE]\n\n"


async def test_pieces_before_an_error_are_written_before_it() -> None:
    asked = request()
    asked.put(Tokens("r", "two", (2,)))
    asked.put(WorkerLost("gone"))
    _, rest, error = await parts(asked)
    assert b'"two"' in rest
    assert b"worker_lost" in error
