"""Response bodies: OpenAI's completion objects, complete or as server-sent events, and its error object.

Trinity adds `retrieval` (the passages used: id, title, distance, and the number of answer tokens before them;
`reranked`), `timings` (seconds per stage, see `stages.stage_seconds`) and, for
an answer from the cache (`answer_cache.py`), `cached`: the similarity of the questions and the age of the answer. In a
stream the first chunk contains the passages found before prefill, each probe has a chunk of its own, and the chunk with
the `finish_reason` contains the timings. A stream ends with the last piece or with an error event.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import InternalError, ResponseTooLarge, TrinityError
from runtime.retrieval.passages import MAX_PASSAGES_BYTES, Attributes, Passage
from runtime.retrieval.stores.collection import FILE, attributes_of
from runtime.retrieval.stores.records import Store
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.requests import Piece, Relayed, Request
from runtime.serving.http.choices import merge_choices, with_message
from runtime.serving.http.ranking import ranking_json
from runtime.serving.messages import Retrieval, Retrieved, Tokens
from runtime.serving.stages import stage_seconds

log = logging.getLogger(__name__)

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """A JSON body, with no headers but its own: the framework would take as long to make these as JSON of the body."""

    def __init__(self, body: bytes, status: int) -> None:
        self.body, self.status_code, self.background = body, status, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]


def json_response(value: object, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Return an HTTP response with a JSON body."""
    body = to_json(value)
    return Response(body, status, headers, media_type="application/json") if headers else JsonResponse(body, status)


def passages_response(value: object) -> Response:
    """Return a response with passages. Raises `ResponseTooLarge` for one that is too large."""
    response = json_response(value)
    if len(response.body) > MAX_PASSAGES_BYTES:
        raise ResponseTooLarge(
            f"the response has {len(response.body):,} bytes, the limit is {MAX_PASSAGES_BYTES:,}: search for fewer "
            "passages",
            "k",
        )
    return response


def event(value: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def error_json(error: TrinityError) -> Json:
    """Return OpenAI's error object."""
    error_type = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": error_type, "param": error.param, "code": error.code}}


def passage_json(passage: Passage) -> Json:
    """Return a passage without its text, with its attributes if it has any; a NaN or infinite distance is null."""
    distance = passage.distance if math.isfinite(passage.distance) else None
    result: Json = {"id": passage.id, "title": passage.title, "distance": distance}
    if passage.score is not None:
        result["relevance_score"] = passage.score
    return result | {"attributes": passage.attributes} if passage.attributes else result


class FoundJson(msgspec.Struct, omit_defaults=True):
    """`passage_json` with the text; msgspec writes a NaN or infinite distance as null."""

    id: str
    title: str
    distance: float
    text: str
    relevance_score: float | None = None
    attributes: Attributes = {}


def _store_passage_json(store: Store, passage: Passage) -> Json:
    """Return a passage of a client's store, with its file and the file's attributes."""
    attributes = attributes_of(store.columns, passage.attributes)
    return passage_json(replace(passage, attributes=attributes)) | {"file_id": passage.attributes.get(FILE)}


@dataclass(slots=True)
class GenerationResponse:
    """Builder of one response. `add` every piece, in order; then `body`, or `opening` and `chunk` for a stream.

    The subclasses are the two endpoints: the names of their objects and the format of a choice.
    """

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    id: str
    model: str
    created: int
    retrieval: Retrieval | None = None
    store: Store | None = None  # of a client, that the passages are from
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    prompt_token_ids: tuple[int, ...] | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    searches: list[Retrieved] = field(default_factory=list)
    prompt_tokens: int = 0  # 0: not known yet
    cached_tokens: int = 0  # of these
    streamed_tokens: int = 0  # in the chunks so far
    choices: list[Json] = field(default_factory=list)  # pieces of the choices of a relayed answer
    last: Tokens | None = None
    cached: Json | None = None  # for an answer from the cache

    def add(self, piece: Piece) -> bool:
        """Add the next piece; return True if it was the last."""
        if isinstance(piece, Retrieved):
            self.searches.append(piece)
            return False
        if piece.prompt_token_ids:
            self.prompt_token_ids = piece.prompt_token_ids
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens or len(piece.prompt_token_ids)
        self.cached_tokens = piece.cached_tokens
        if isinstance(piece, Relayed):
            self.choices += piece.choices
        if piece.finish_reason is not None:
            self.last = piece
        return self.last is not None

    def body(self) -> Json:
        """Return the complete response; the last piece must have been added."""
        assert self.last is not None, "the last piece was added"
        choice = self._complete_choice("".join(self.texts)) | {"finish_reason": self.last.finish_reason}
        if self.return_token_ids:
            choice["token_ids"] = self.token_ids
        body = self._object(self.object_name, choice) | {"usage": self._usage(self.last)}
        if isinstance(self.last, Relayed):
            body["choices"] = [with_message(choice) for choice in merge_choices(self.choices)]
        return body | self._extensions() | {"timings": self._timings(self.last)}

    def to_pieces(self) -> tuple[Piece, ...]:
        """Return the complete answer as pieces for the cache: the searches, and all tokens in one piece."""
        assert self.last is not None, "the last piece was added"
        last = Tokens(
            self.id,
            "".join(self.texts),
            tuple(self.token_ids),
            self.last.finish_reason,
            self.last.prompt_tokens,
            prompt_token_ids=self.prompt_token_ids or (),
        )
        if isinstance(self.last, Relayed):
            last = Relayed(
                **msgspec.structs.asdict(last),
                choices=merge_choices(self.choices),
                usage=self.last.usage,
                completion_tokens=self.last.completion_tokens,
            )
        return (*self.searches, last)

    def opening(self) -> bytes:
        """Return the first event: the role, and the passages found so far."""
        return event(self._chunk(self._first_choice()) | self._extensions())

    def chunk(self, piece: Piece) -> bytes:
        """Return the event of one piece, b"" for an empty one (its text may be held back)."""
        if isinstance(piece, Retrieved):
            if self.retrieval is None:
                return b""
            return event(self._chunk(self._choice("")) | {"retrieval": self._passages(self.retrieval, [piece])})
        if isinstance(piece, Relayed):
            self.streamed_tokens = piece.completion_tokens
            chunk = self._chunk({}) | {"choices": piece.choices}
        else:
            self.streamed_tokens += len(piece.token_ids)
            if not piece.text and piece.finish_reason is None and not self.return_token_ids:
                return b""
            choice = self._choice(piece.text) | {"finish_reason": piece.finish_reason}
            if self.return_token_ids:
                choice["token_ids"] = piece.token_ids
            chunk = self._chunk(choice)
        if piece.finish_reason is not None:
            chunk["timings"] = self._timings(piece)
        return event(chunk)

    def closing(self) -> bytes:
        """Return what follows the last piece: the usage if requested, and the end mark."""
        if not self.include_usage or self.last is None:
            return DONE
        chunk = self._chunk({}) | {"choices": [], "usage": self._usage(self.last)}
        return event(chunk) + DONE

    def _extensions(self) -> Json:
        """Return Trinity's own fields of the response, or of its first chunk."""
        fields: Json = {}
        if self.retrieval is not None:
            fields["retrieval"] = self._passages(self.retrieval, self.searches)
        if self.return_token_ids:
            fields["prompt_token_ids"] = self.prompt_token_ids
        if self.cached is not None:
            fields["cached"] = self.cached
        return fields

    def _usage(self, last: Tokens) -> Json | None:
        if isinstance(last, Relayed):
            return last.usage
        return _usage_json(last.prompt_tokens, len(self.token_ids), self.cached_tokens)

    def _usage_so_far(self) -> Json | None:
        """Return it if requested and the number of prompt tokens is known."""
        if not (self.continuous_usage and self.prompt_tokens):
            return None
        return _usage_json(self.prompt_tokens, self.streamed_tokens, self.cached_tokens)

    def _timings(self, last: Tokens) -> dict[str, float]:
        tokens = last.completion_tokens if isinstance(last, Relayed) else len(self.token_ids)
        seconds = stage_seconds(last.stages, tokens)
        if self.retrieval is not None and self.retrieval.every_tokens:
            seconds["probe_stall"] = last.stalled_ns / 1e9
        return seconds

    def _passages(self, retrieval: Retrieval, searches: Iterable[Retrieved]) -> Json:
        searches = list(searches)
        to_json = passage_json if self.store is None else partial(_store_passage_json, self.store)
        passages = [
            to_json(passage) | {"at_token": search.at_token} for search in searches for passage in search.passages
        ]
        name = self.store.id if self.store else retrieval.collection
        ranking = next((search.ranking for search in searches if search.ranking), "")
        return {"collection": name, "passages": passages} | ranking_json(ranking)

    def _object(self, name: str, choice: Json) -> Json:
        choices = [{"index": 0, "logprobs": None, "finish_reason": None} | choice]
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, choice: Json) -> Json:
        chunk = self._object(self.chunk_object_name, choice)
        return chunk | {"usage": self._usage_so_far()} if self.include_usage else chunk

    def _choice(self, text: str) -> Json:
        raise NotImplementedError

    def _first_choice(self) -> Json:
        return self._choice("")

    def _complete_choice(self, text: str) -> Json:
        return self._choice(text)


def _usage_json(prompt: int, completion: int, cached: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChatResponse(GenerationResponse):
    """Response of /v1/chat/completions."""

    object_name, chunk_object_name = "chat.completion", "chat.completion.chunk"

    def _first_choice(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _choice(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _complete_choice(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionResponse(GenerationResponse):
    """Response of /v1/completions."""

    object_name = chunk_object_name = "text_completion"

    def _choice(self, text: str) -> Json:
        return {"text": text}


_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers the events
}


class EventStream(Response):
    """Server-sent events. Unlike starlette's StreamingResponse it does not read `receive`: another task watches it.

    `failure` returns the event of an error, which ends the stream; `running` is closed at the end, however it comes.
    """

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[bytes],
        failure: Callable[[TrinityError], bytes],
        running: ExitStack,
    ) -> None:
        self._request, self._events, self._failure, self._running = request, events, failure, running
        self.status_code = 200
        self.background = None
        self.init_headers(_STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they arrive."""
        with self._running:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (chunk := await self._next()) is not None:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> bytes | None:
        """Return what to send next, None at the end."""
        try:
            return await anext(self._events, None)
        except TrinityError as error:
            return self._failure(error)
        except Exception:
            log.exception("stream failed", extra={"request": self._request.id})
            return self._failure(InternalError("internal error; the server's log has more"))


def in_flight(http: HttpRequest, engine: Engine, request: Request) -> ExitStack:
    """Return a context in which the request is cancelled if its client disconnects; at its end it is over, too."""

    async def cancel_on_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":  # the only message left after the body
            pass
        engine.cancel(request)

    running = ExitStack()
    running.callback(engine.cancel, request)
    running.callback(asyncio.create_task(cancel_on_disconnect()).cancel)
    return running


async def first_tokens(response: GenerationResponse, request: Request) -> Tokens:
    """Add pieces up to and including the first tokens and return these. Raises the request's error."""
    while True:
        piece = await request.next()
        response.add(piece)
        if isinstance(piece, Tokens):
            return piece


async def events(
    response: GenerationResponse, request: Request, first: Tokens, on_complete: Callable[[], None]
) -> AsyncIterator[bytes]:
    """Yield the events from the first tokens on; pieces that arrive together are sent together.

    `on_complete` is called once the answer is complete. Raises the request's error.
    """
    yield response.opening() + response.chunk(first)
    while response.last is None:
        pieces = await request.next_batch()
        for piece in pieces:
            response.add(piece)
        yield b"".join([response.chunk(piece) for piece in pieces])
    on_complete()
    yield response.closing()


def error_event(error: TrinityError) -> bytes:
    """Return the events that end a stream after an error."""
    return event(error_json(error)) + DONE
