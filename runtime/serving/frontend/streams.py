"""An answer as server-sent events: as its pieces come, ended by its last one or by an error event."""

import logging
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import InternalError, TrinityError
from runtime.serving.frontend.answers import DONE, Answer, error_json, event
from runtime.serving.frontend.requests import Request
from runtime.serving.messages import Tokens

log = logging.getLogger(__name__)


class EventStream(Response):
    """Server-sent events. Unlike starlette's StreamingResponse it leaves `receive` to the watch for disconnects."""

    def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None]) -> None:
        self.events = events
        self.release = release
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come; then, or when that fails, `release`."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self.events:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.release()


async def first_tokens(answer: Answer, request: Request) -> Tokens:
    """Take in pieces up to the first tokens. Raises what ended the request before."""
    while True:
        piece = await request.next()
        answer.add(piece)
        if isinstance(piece, Tokens):
            return piece


async def events(answer: Answer, request: Request, first: Tokens, whole: Callable[[], None]) -> AsyncIterator[bytes]:
    """The stream from its first tokens on, what has come together in one part; `whole` is called when all of the answer
    is there."""
    try:
        yield answer.opening() + answer.chunk(first)
        while answer.last is None:
            pieces = await request.next_ones()
            for piece in pieces:
                answer.add(piece)
            yield b"".join([answer.chunk(piece) for piece in pieces])
        whole()
        yield answer.closing()
    except TrinityError as error:
        yield event(error_json(error)) + DONE
    except Exception:
        log.exception("failed within its stream", extra={"request": answer.id})
        yield event(error_json(InternalError("internal error; the server's log has more"))) + DONE
