"""Requests in flight. Each ends exactly once: finished, failed, cancelled, expired, or lost with its workers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from runtime.errors import ResponseTooLarge, TrinityError
from runtime.retrieval.passages import size_of
from runtime.serving.frontend.choice import prefix_blocks
from runtime.serving.frontend.router import NO_PREFIX, UNPLACED, KnownPrefix, Placement, known_prefix
from runtime.serving.messages import Generation, Prefill, Resume, Retrieved, Tokens

Json = dict[str, Any]
MAX_CITED_BYTES = 1 << 20  # of an answer's passages, without their texts
MAX_UNREAD_PIECES = 1024


class Relayed(Tokens, frozen=True, kw_only=True):
    """A piece of an answer that another server generates, with its choices unchanged.

    `choices` are as the server sent them, each with its `index` and a `delta` (a chat) or `text` (a completion). `text`
    and `token_ids` are those of the first choice, as far as they are known. The last piece has the `finish_reason`
    "length" if any choice ended so, and the `usage`, None if the server did not send it; `completion_tokens` then
    counts the pieces seen.
    """

    choices: tuple[Json, ...] = ()
    usage: Json | None = None
    completion_tokens: int = 0


Piece = Retrieved | Tokens


class ClientDisconnected(TrinityError):
    """The client closed the connection before the answer was complete."""

    code = "client_closed_request"
    status = 499


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a request ended: `code` is "stop", "length" or an error's code; `stages` are stamps in monotonic ns."""

    request_id: str
    code: str
    prompt_tokens: int
    completion_tokens: int
    stages: dict[str, int]


@dataclass(slots=True)
class Progress:
    """The part of an answer that was delivered: enough to continue it elsewhere without a repeated or missing token."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    inserted: dict[int, tuple[int, ...]] = field(default_factory=dict)  # number of tokens before → inserted by a probe
    passages: list[str] = field(default_factory=list)
    prefix_tokens: int = 0  # of the prompt, before the passages; 0: unknown
    count: int = 0  # of tokens; of pieces, if a server sends no token ids
    last_probe_at: int = 0  # number of tokens at the last probe

    def add(self, piece: Piece) -> None:
        """Record a delivered piece."""
        if isinstance(piece, Tokens):
            self.prompt = piece.prompt_token_ids or self.prompt
            self.tokens += piece.token_ids
            self.last_probe_at = piece.last_probe_at or self.last_probe_at
            self.count = piece.completion_tokens if isinstance(piece, Relayed) else len(self.tokens)
        else:
            self.passages += [passage.id for passage in piece.passages]
            self.prefix_tokens = piece.prefix_tokens or self.prefix_tokens
            if piece.inserted:
                self.inserted[piece.at_token] = piece.inserted

    def resume(self, first_token_ns: int) -> Resume:
        """Return the sequence so far. Tokens inserted by a probe stand before the token that was the last one then.

        A probe was pending if the last token triggered it and nothing was inserted. (Or it found nothing; then the
        retried probe finds nothing either.)
        """
        generated, last = self.tokens, None
        if generated and len(generated) == self.last_probe_at and len(generated) not in self.inserted:
            generated, last = generated[:-1], generated[-1]
        sequence = list(self.prompt)
        for number, token in enumerate(generated, start=1):
            sequence += [*self.inserted.get(number, ()), token]
        return Resume(
            tokens=tuple(sequence),
            prompt_tokens=len(self.prompt),
            generated=tuple(generated),
            seen_passages=tuple(self.passages),
            first_token_ns=first_token_ns,
            last_token=last,
            last_probe_at=self.last_probe_at,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One request in flight: pieces in order, then its end.

    The queue of pieces is bounded by max_tokens or the context, and by `MAX_CITED_BYTES` for passages; an engine that
    relays another server's pieces, whatever their size, awaits `wait_for_reader` before each.
    The passages of a request with retrieval come from the prefill worker over a connection of its own, so the first
    tokens of the decode worker can arrive before them: all pieces are `held` until both have arrived. Until then the
    request can be restarted from the beginning, afterwards (`opened`) it is resumed from what was `delivered`.

    `prefix` is what the router knows of its prompt, until it is computed. `placement` is where it runs, or ran last if
    it is not `placed`. `attempts` counts its restarts, `resends` the retries within one attempt, by an engine that
    retries itself.
    """

    id: str
    generation: Generation
    placement: Placement = UNPLACED
    placed: bool = False
    attempts: int = 0
    resends: int = 0
    prefilled: bool = False
    opened: bool = False
    ended: bool = False
    first_token_ns: int = 0
    delivered: Progress = field(default_factory=Progress)
    held: list[Piece] = field(default_factory=list)
    cited_bytes: int = 0  # of all passages
    prefix: KnownPrefix = NO_PREFIX
    _pieces: asyncio.Queue[Piece | TrinityError] = field(default_factory=asyncio.Queue)
    _was_read: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def attempt_id(self) -> str:
        """The id that workers see: a new one with every restart, so that late pieces of an attempt are recognized."""
        return f"{self.id}~{self.attempts}" if self.attempts else self.id

    @property
    def deadline_ns(self) -> int:
        return self.generation.deadline_ns

    def runs_on(self, worker: str) -> bool:
        """Whether the loss of this worker affects it (prefill's part ends when decode has the request)."""
        if not self.placed:
            return False
        in_prefill = self.placement.prefill == worker and not (self.prefilled and self.has_passages)
        return in_prefill or self.placement.decode == worker

    @property
    def has_passages(self) -> bool:
        """Whether the prefill worker has sent all that it sends: the passages found before prefill, if any."""
        return self.opened or self.generation.retrieval is None or any(map(_found_before_prefill, self.held))

    def resume(self) -> Resume | None:
        """Return where the next attempt continues; None: at the beginning."""
        return self.delivered.resume(self.first_token_ns) if self.opened else None

    def known_prefix(self, resume: Resume | None) -> KnownPrefix:
        """Return what the router knows of the next attempt's prompt, computed once an attempt."""
        if self.prefix is not NO_PREFIX:
            return self.prefix
        if resume is None:
            self.prefix = known_prefix(self.generation)
        else:
            self.prefix = NO_PREFIX._replace(blocks=prefix_blocks(resume.tokens, salt=self.generation.salt))
        return self.prefix

    def computed_prefix(self) -> tuple[KnownPrefix, tuple[int, ...], bytes] | None:
        """Return that prefix, its tokens and their salt, once, when the prompt is computed; None otherwise."""
        prompt, prefix = self.delivered.prompt, self.prefix
        if not self.opened or not prefix.blocks:
            return None
        self.prefix = NO_PREFIX
        known = len(prompt) if self.generation.retrieval is None else self.delivered.prefix_tokens
        return (prefix, prompt[:known], self.generation.salt) if known and prefix.length else None

    def message(self, frontend_epoch: int, placement: Placement, resume: Resume | None) -> Prefill:
        """Return the message for the prefill worker of a placement."""
        generation = replace(self.generation, messages=(), prompt="") if resume else self.generation
        return Prefill(
            self.attempt_id, frontend_epoch, generation, placement.decode, placement.decode_endpoint, resume,
            placement.decode_load,
        )  # fmt: skip

    async def next(self) -> Piece:
        """Return the next piece; the last is a `Tokens` with a `finish_reason`. Raises the error of the request."""
        piece = await self._pieces.get()
        self._was_read.set()
        if isinstance(piece, TrinityError):
            self._pieces.put_nowait(piece)  # further calls raise it too
            raise piece
        return piece

    async def next_batch(self) -> list[Piece]:
        """Return the next piece and all that are queued behind it, in order. Raises the request's error."""
        pieces = [await self.next()]
        while not self._pieces.empty():
            piece = self._pieces.get_nowait()
            if isinstance(piece, TrinityError):
                self._pieces.put_nowait(piece)  # raised by the next call
                break
            pieces.append(piece)
        return pieces

    async def wait_for_reader(self) -> None:
        """Wait until at most `MAX_UNREAD_PIECES` are queued."""
        while self._pieces.qsize() > MAX_UNREAD_PIECES:
            self._was_read.clear()
            await self._was_read.wait()

    def put(self, piece: Piece | TrinityError) -> None:
        """Queue a piece or the end; called by the table only."""
        self._pieces.put_nowait(piece)


class RequestTable:
    """Requests in flight by attempt id. `on_end` is called once for each, after it has left the table."""

    def __init__(self, on_end: Callable[[RequestOutcome, Request], None]) -> None:
        self._requests: dict[str, Request] = {}
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, request: Request) -> None:
        """Add a request; its id must be new."""
        if request.attempt_id in self._requests:
            raise ValueError(f"request id {request.id!r} is in flight already")
        self._requests[request.attempt_id] = request

    def get(self, attempt_id: str) -> Request | None:
        """Return the request in flight with this attempt id, or None."""
        return self._requests.get(attempt_id)

    def start_attempt(self, request: Request) -> None:
        """Give a request that is restarted a new attempt id; later pieces of the last attempt are ignored."""
        del self._requests[request.attempt_id]
        request.attempts += 1
        request.prefilled = False
        request.prefix = NO_PREFIX
        request.held.clear()
        if not request.opened:
            request.first_token_ns = request.cited_bytes = 0
        self._requests[request.attempt_id] = request

    def deliver(self, piece: Piece) -> bool:
        """Deliver a piece to its request; a `finish_reason` ends it. Return False if the request is not in flight.

        Raises `ResponseTooLarge`, with nothing delivered, for passages whose titles and attributes are too large.
        """
        request = self._requests.get(piece.request_id)
        if request is None:
            return False
        if isinstance(piece, Retrieved):
            request.cited_bytes += sum(size_of(one.id, one.title, "", one.attributes) for one in piece.passages)
            if request.cited_bytes > MAX_CITED_BYTES:
                raise ResponseTooLarge(
                    f"the ids, titles and attributes of the passages have {request.cited_bytes:,} bytes, the limit of "
                    f"an answer is {MAX_CITED_BYTES:,}: use a smaller k, or fewer probes",
                    "retrieval.k",
                )
        if request.opened:
            self._forward(request, piece)
            return True
        request.held.append(piece)
        if request.has_passages and any(isinstance(piece, Tokens) for piece in request.held):
            request.opened = True
            pieces, request.held = request.held, []
            early = list(filter(_found_before_prefill, pieces))
            for piece in (*early, *(piece for piece in pieces if piece not in early)):
                self._forward(request, piece)
        return True

    def _forward(self, request: Request, piece: Piece) -> None:
        request.delivered.add(piece)
        request.put(piece)
        if isinstance(piece, Tokens) and piece.finish_reason is not None:
            self._end(request, piece.finish_reason, piece.prompt_tokens, piece.stages)

    def fail(self, request: Request, error: TrinityError) -> bool:
        """End a request with an error. Return False, without any effect, if it has ended before."""
        if request.ended:
            return False
        request.put(error)
        self._end(request, error.code, 0, {})
        return True

    def of_worker(self, name: str) -> list[Request]:
        """Return the requests that the loss of this worker affects."""
        return [request for request in self._requests.values() if request.runs_on(name)]

    def expired(self, now_ns: int) -> list[Request]:
        """Return the requests whose deadline has passed."""
        return [request for request in self._requests.values() if request.deadline_ns <= now_ns]

    def all(self) -> list[Request]:
        """Return all requests in flight."""
        return list(self._requests.values())

    def _end(self, request: Request, code: str, prompt_tokens: int, stages: dict[str, int]) -> None:
        del self._requests[request.attempt_id]
        request.ended = True
        self._on_end(RequestOutcome(request.id, code, prompt_tokens, request.delivered.count, stages), request)


def _found_before_prefill(piece: Piece) -> bool:
    return isinstance(piece, Retrieved) and piece.at_token == 0
