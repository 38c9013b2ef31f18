"""What the HTTP interface gives: OpenAI's answer objects, whole or as server-sent events, and its error object.

Trinity's own additions: `retrieval` (the passages used: id, title, distance, and after how many tokens of the answer
they came; `partial` where nodes of the collection were missing), `timings` (seconds by stage, see
`stages.stage_seconds`) and, of an answer that was stored (`answer_cache.py`), `cached`: how alike the questions are and
how old it is. In a stream the first chunk carries the passages found before prefill, each probe has a chunk of its own,
and the chunk with the `finish_reason` the timings. A stream has its pieces as they come, and ends with the last one or
with an error event.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import InternalError, TrinityError
from runtime.retrieval.passages import Passage
from runtime.serving.frontend.requests import Choices, Piece, Relayed, Request
from runtime.serving.messages import Retrieval, Retrieved, Tokens
from runtime.serving.stages import stage_seconds

log = logging.getLogger(__name__)

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.Encoder().encode


def json_response(value: object, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """An HTTP answer that is not streamed."""
    return Response(to_json(value), status, headers, media_type="application/json")


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def error_json(error: TrinityError) -> Json:
    """OpenAI's error object."""
    object_name = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": object_name, "param": error.param, "code": error.code}}


def passage_json(passage: Passage) -> Json:
    """A passage without its text, with its attributes if it has any; a distance that is no number is null."""
    distance = passage.distance if math.isfinite(passage.distance) else None
    found: Json = {"id": passage.id, "title": passage.title, "distance": distance}
    return found | {"attributes": passage.attributes} if passage.attributes else found


@dataclass(slots=True)
class GenerationResponse:
    """One answer in the making. `add` every piece, in order; then `whole`, or `opening` and `chunk` as they come.

    The subclasses are the two endpoints' dialects: what their objects are called, and a choice of them.
    """

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    id: str
    model: str
    created: int
    retrieval: Retrieval | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    prompt_token_ids: tuple[int, ...] | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    searches: list[Retrieved] = field(default_factory=list)
    prompt_tokens: int = 0  # 0: not known yet
    streamed_tokens: int = 0  # with the chunks so far
    choices: Choices = field(default_factory=Choices)  # of an answer that another server writes
    last: Tokens | None = None
    cached: Json | None = None  # of an answer that the model did not write now

    def add(self, piece: Piece) -> bool:
        """Take in the next piece; True when it was the last."""
        if isinstance(piece, Retrieved):
            self.searches.append(piece)
            return False
        if piece.prompt_token_ids:
            self.prompt_token_ids = piece.prompt_token_ids
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens or len(piece.prompt_token_ids)
        if isinstance(piece, Relayed):
            self.choices.add(piece.choices)
        if piece.finish_reason is not None:
            self.last = piece
        return self.last is not None

    def whole(self) -> Json:
        """The answer in one piece; all of its pieces are there."""
        assert self.last is not None, "an answer has a last piece"
        choice = self._whole_choice("".join(self.texts)) | {"finish_reason": self.last.finish_reason}
        if self.return_token_ids:
            choice["token_ids"] = self.token_ids
        answer = self._object(self.object_name, choice) | {"usage": self._usage(self.last)}
        if isinstance(self.last, Relayed):
            answer["choices"] = self.choices.whole()
        if self.retrieval is not None:
            answer["retrieval"] = self._passages(self.retrieval, self.searches)
        if self.return_token_ids:
            answer["prompt_token_ids"] = self.prompt_token_ids
        if self.cached is not None:
            answer["cached"] = self.cached
        return answer | {"timings": self._timings(self.last)}

    def pieces(self) -> tuple[Piece, ...]:
        """All of a whole answer, to be given again: what was found, and its tokens in one piece."""
        assert self.last is not None, "an answer has a last piece"
        last = Tokens(
            self.id,
            "".join(self.texts),
            tuple(self.token_ids),
            self.last.finish_reason,
            self.last.prompt_tokens,
            prompt_token_ids=self.prompt_token_ids or (),
        )
        if isinstance(self.last, Relayed):
            whole = msgspec.structs.asdict(last) | {"usage": self.last.usage}
            choices = self.choices.merged()
            last = Relayed(**whole, choices=choices, completion_tokens=self.last.completion_tokens)
        return (*self.searches, last)

    def opening(self) -> bytes:
        """The first event: who speaks, and the passages found so far."""
        chunk = self._chunk(self._first_choice())
        if self.retrieval is not None:
            chunk["retrieval"] = self._passages(self.retrieval, self.searches)
        if self.return_token_ids:
            chunk["prompt_token_ids"] = self.prompt_token_ids
        if self.cached is not None:
            chunk["cached"] = self.cached
        return event(chunk)

    def chunk(self, piece: Piece) -> bytes:
        """The event of one piece; nothing when there is nothing to say (its text may be held back)."""
        if isinstance(piece, Retrieved):
            if self.retrieval is None:
                return b""
            return event(self._chunk(self._choice("")) | {"retrieval": self._passages(self.retrieval, [piece])})
        if isinstance(piece, Relayed):
            self.streamed_tokens = piece.completion_tokens
            chunk = self._chunk({}) | {"choices": piece.choices}
            return event(chunk if piece.finish_reason is None else chunk | {"timings": self._timings(piece)})
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
        """What follows the last piece: the usage if it was asked for, and the end mark."""
        if not self.include_usage or self.last is None:
            return DONE
        chunk = self._chunk({}) | {"choices": [], "usage": self._usage(self.last)}
        return event(chunk) + DONE

    def _usage(self, last: Tokens) -> Json | None:
        if isinstance(last, Relayed):
            return last.usage
        return _counts(last.prompt_tokens, len(self.token_ids))

    def _usage_so_far(self) -> Json | None:
        """If it was asked for, and the prompt's tokens are known."""
        if not (self.continuous_usage and self.prompt_tokens):
            return None
        return _counts(self.prompt_tokens, self.streamed_tokens)

    def _timings(self, last: Tokens) -> dict[str, float]:
        tokens = last.completion_tokens if isinstance(last, Relayed) else len(self.token_ids)
        spans = stage_seconds(last.stages, tokens)
        if self.retrieval is not None and self.retrieval.every_tokens:
            spans["probe_stall"] = last.stalled_ns / 1e9
        return spans

    def _passages(self, retrieval: Retrieval, searches: Iterable[Retrieved]) -> Json:
        searches = list(searches)
        passages = [
            passage_json(passage) | {"at_token": search.at_token} for search in searches for passage in search.passages
        ]
        found: Json = {"collection": retrieval.collection, "passages": passages}
        return found | {"partial": True} if any(search.partial for search in searches) else found

    def _object(self, object_name: str, choice: Json) -> Json:
        choices = [{"index": 0, "logprobs": None, "finish_reason": None} | choice]
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, choice: Json) -> Json:
        chunk = self._object(self.chunk_object_name, choice)
        return chunk | {"usage": self._usage_so_far()} if self.include_usage else chunk

    def _choice(self, text: str) -> Json:
        raise NotImplementedError

    def _first_choice(self) -> Json:
        return self._choice("")

    def _whole_choice(self, text: str) -> Json:
        return self._choice(text)


def _counts(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ChatResponse(GenerationResponse):
    """The dialect of /v1/chat/completions."""

    object_name, chunk_object_name = "chat.completion", "chat.completion.chunk"

    def _first_choice(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _choice(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _whole_choice(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionResponse(GenerationResponse):
    """The dialect of /v1/completions."""

    object_name = chunk_object_name = "text_completion"

    def _choice(self, text: str) -> Json:
        return {"text": text}


_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


class EventStream(Response):
    """Server-sent events. Unlike starlette's StreamingResponse it leaves `receive` to the watch for disconnects."""

    def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None]) -> None:
        self.events = events
        self.release = release
        self.status_code = 200
        self.background = None
        self.init_headers(_STREAM)

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


async def first_tokens(answer: GenerationResponse, request: Request) -> Tokens:
    """Take in pieces up to the first tokens. Raises what ended the request before."""
    while True:
        piece = await request.next()
        answer.add(piece)
        if isinstance(piece, Tokens):
            return piece


async def events(
    answer: GenerationResponse, request: Request, first: Tokens, on_complete: Callable[[], None]
) -> AsyncIterator[bytes]:
    """Yield the events from the first tokens on; pieces that arrive together form one chunk of the body.

    `on_complete` is called once the answer is complete.
    """
    try:
        yield answer.opening() + answer.chunk(first)
        while answer.last is None:
            pieces = await request.next_batch()
            for piece in pieces:
                answer.add(piece)
            yield b"".join([answer.chunk(piece) for piece in pieces])
        on_complete()
        yield answer.closing()
    except TrinityError as error:
        yield event(error_json(error)) + DONE
    except Exception:
        log.exception("failed within its stream", extra={"request": answer.id})
        yield event(error_json(InternalError("internal error; the server's log has more"))) + DONE
