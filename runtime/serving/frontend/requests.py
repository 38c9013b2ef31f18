"""The requests in flight. Each ends exactly once: finished, failed, cancelled, late, or lost with its workers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from runtime.errors import TrinityError
from runtime.serving.frontend.router import UNPLACED, Placement
from runtime.serving.messages import Generation, Prefill, Resume, Retrieved, Tokens

# ---- pieces of an answer that another server writes: its choices go on as they came, with all that it put into them


Json = dict[str, Any]

_CONCATENATED = frozenset({"content", "text", "reasoning_content", "reasoning", "refusal", "arguments"})


class Relayed(Tokens, frozen=True, kw_only=True):
    """`choices` as the server wrote them, each with its `index` and a `delta` (a chat) or `text` (a completion).

    `text` and `token_ids` are those of the first choice, as far as they are known. The last piece's `finish_reason`
    says "length" if any choice ended so; the choices have their own. `usage` comes with the last piece, None if the
    server did not tell it; `completion_tokens` then counts what was seen.
    """

    choices: tuple[Json, ...] = ()
    usage: Json | None = None
    completion_tokens: int = 0


@dataclass(slots=True)
class Choices:
    """The choices of a whole answer, put together from their pieces. A stream never asks for them."""

    pieces: list[Json] = field(default_factory=list)

    def add(self, choices: tuple[Json, ...]) -> None:
        """Take in a piece's."""
        self.pieces += choices

    def merged(self) -> tuple[Json, ...]:
        """Each choice in one piece, in order."""
        merged: dict[int, Json] = {}
        for choice in self.pieces:
            index = choice.get("index", 0)
            merged[index] = _merge_delta(merged[index], choice) if index in merged else choice
        return tuple(choice for _, choice in sorted(merged.items()))

    def whole(self) -> list[Json]:
        """All choices in order, a chat's `delta`s as messages."""
        return [_with_message(choice) for choice in self.merged()]


def _with_message(choice: Json) -> Json:
    if "delta" not in choice:
        return choice
    message = {"role": "assistant", "content": None, "refusal": None} | choice["delta"]
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    rest = {name: value for name, value in choice.items() if name != "delta"}
    return rest | {"message": message}


def _merge_delta(old: Json, new: Json) -> Json:
    """A piece behind what there is: text grows, lists too (of things with an `index` by it), the rest is replaced."""
    grown = dict(old)
    for name, value in new.items():
        before = old.get(name)
        if value is None:
            grown.setdefault(name, None)
        elif isinstance(value, dict) and isinstance(before, dict):
            grown[name] = _merge_delta(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            grown[name] = _merge_lists(before, value)
        elif isinstance(value, str) and isinstance(before, str) and name in _CONCATENATED:
            grown[name] = before + value
        else:
            grown[name] = value
    return grown


def _merge_lists(old: list[Any], new: list[Any]) -> list[Any]:
    if not all(isinstance(entry, dict) and "index" in entry for entry in (*old, *new)):
        return old + new
    by_index = {entry["index"]: entry for entry in old}
    for entry in new:
        index = entry["index"]
        by_index[index] = _merge_delta(by_index[index], entry) if index in by_index else entry
    return [entry for _, entry in sorted(by_index.items())]


Piece = Retrieved | Tokens


class ClientDisconnected(TrinityError):
    """Nobody waits for the answer any more."""

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
    """What of an answer is with its consumer: enough to go on elsewhere, with no token twice and none left out."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    inserted: dict[int, tuple[int, ...]] = field(default_factory=dict)  # after how many tokens → what a probe brought
    passages: list[str] = field(default_factory=list)
    count: int = 0  # of tokens; of an answer whose tokens nobody tells, of its pieces
    last_probe_at: int = 0  # after how many tokens the last probe was asked

    def add(self, piece: Piece) -> None:
        """Take note of a piece."""
        if isinstance(piece, Tokens):
            self.prompt = piece.prompt_token_ids or self.prompt
            self.tokens += piece.token_ids
            self.last_probe_at = piece.last_probe_at or self.last_probe_at
            self.count = piece.completion_tokens if isinstance(piece, Relayed) else len(self.tokens)
        else:
            self.passages += [passage.id for passage in piece.passages]
            if piece.inserted:
                self.inserted[piece.at_token] = piece.inserted

    def resume(self, first_token_ns: int) -> Resume:
        """The sequence so far. What a probe brought went in before the token that was the last one then.

        A probe was out if the last token called for it and it had brought nothing. (Or it had found nothing; then it
        finds nothing again.)
        """
        told, last = self.tokens, None
        if told and len(told) == self.last_probe_at and len(told) not in self.inserted:
            told, last = told[:-1], told[-1]
        sequence = list(self.prompt)
        for number, token in enumerate(told, start=1):
            sequence += [*self.inserted.get(number, ()), token]
        return Resume(
            tuple(sequence),
            len(self.prompt),
            tuple(told),
            tuple(self.passages),
            first_token_ns,
            last,
            self.last_probe_at,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One request in flight, as its consumer sees it: pieces in order, then its end.

    What waits here is bounded by the request's own max_tokens, or by the context, so a slow reader needs no other
    limit. A request with retrieval has its passages from the prefill worker, over a connection of its own, so the
    decode worker's first pieces can be here sooner: all are `held` until both are there. Until then it can be started
    again as if nothing had happened; after that (`opened`) it can be resumed, from what it `delivered`.

    `placement` is where it runs, or ran last (then it is not `placed`). `attempts` counts how often it was started
    again, `resends` how often within one attempt: by an engine that looks after this itself.
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
    _pieces: asyncio.Queue[Piece | TrinityError] = field(default_factory=asyncio.Queue)

    @property
    def attempt_id(self) -> str:
        """Its id for the workers: a new one with every start, so that no piece of an old one can be taken for it."""
        return f"{self.id}~{self.attempts}" if self.attempts else self.id

    @property
    def deadline_ns(self) -> int:
        return self.generation.deadline_ns

    def runs_on(self, worker: str) -> bool:
        """Whether it would be lost with this worker (a prefill worker's part ends when decode has it)."""
        if not self.placed:
            return False
        part = self.placement.prefill == worker and not (self.prefilled and self.opened)
        return part or self.placement.decode == worker

    def resume(self) -> Resume | None:
        """Where its next start goes on; None if that is the beginning."""
        if not self.opened:
            return None
        return self.delivered.resume(self.first_token_ns)

    def message(self, frontend_epoch: int, placement: Placement, resume: Resume | None) -> Prefill:
        """What the prefill worker of a placement is told."""
        asked = replace(self.generation, messages=(), prompt="") if resume else self.generation
        return Prefill(
            self.attempt_id, frontend_epoch, asked, placement.decode, placement.decode_endpoint, resume,
            placement.decode_load,
        )  # fmt: skip

    async def next(self) -> Piece:
        """The next piece, in order; the last is a `Tokens` with a `finish_reason`. Raises what ended the request."""
        piece = await self._pieces.get()
        if isinstance(piece, TrinityError):
            self._pieces.put_nowait(piece)  # an end stays an end, however often one asks
            raise piece
        return piece

    async def next_batch(self) -> list[Piece]:
        """The next piece and all behind it that are there already, in order. Raises what ended the request."""
        found = [await self.next()]
        while not self._pieces.empty():
            piece = self._pieces.get_nowait()
            if isinstance(piece, TrinityError):
                self._pieces.put_nowait(piece)  # told when it is asked for next
                break
            found.append(piece)
        return found

    def put(self, piece: Piece | TrinityError) -> None:
        """For the table alone."""
        self._pieces.put_nowait(piece)


class RequestTable:
    """Requests in flight, by their ids for the workers. `on_end` is called once for each, when it has left."""

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
        """The request in flight with this id for the workers, or None when it never was or has ended."""
        return self._requests.get(attempt_id)

    def start_attempt(self, request: Request) -> None:
        """The request is to be started again: what still comes of the last attempt is not its own any more."""
        del self._requests[request.attempt_id]
        request.attempts += 1
        request.prefilled = False
        request.held.clear()
        if not request.opened:
            request.first_token_ns = 0
        self._requests[request.attempt_id] = request

    def deliver(self, piece: Piece) -> bool:
        """Pass a piece to its request; a `finish_reason` ends it. False when the request is not in flight."""
        request = self._requests.get(piece.request_id)
        if request is None:
            return False
        if request.opened:
            self._forward(request, piece)
            return True
        request.held.append(piece)
        found = [piece for piece in request.held if isinstance(piece, Retrieved) and piece.at_token == 0]
        if (found or request.generation.retrieval is None) and any(isinstance(piece, Tokens) for piece in request.held):
            request.opened = True
            pieces, request.held = request.held, []
            for piece in (*found, *(piece for piece in pieces if piece not in found)):
                self._forward(request, piece)
        return True

    def _forward(self, request: Request, piece: Piece) -> None:
        request.delivered.add(piece)
        request.put(piece)
        if isinstance(piece, Tokens) and piece.finish_reason is not None:
            self._end(request, piece.finish_reason, piece.prompt_tokens, piece.stages)

    def fail(self, request: Request, error: TrinityError) -> bool:
        """End a request with an error. False, and nothing happens, when it has ended before."""
        if request.ended:
            return False
        request.put(error)
        self._end(request, error.code, 0, {})
        return True

    def of_worker(self, name: str) -> list[Request]:
        """The requests that would be lost with this worker."""
        return [request for request in self._requests.values() if request.runs_on(name)]

    def expired(self, now_ns: int) -> list[Request]:
        """The requests whose deadline has passed."""
        return [request for request in self._requests.values() if request.deadline_ns <= now_ns]

    def all(self) -> list[Request]:
        """All requests in flight."""
        return list(self._requests.values())

    def _end(self, request: Request, code: str, prompt_tokens: int, stages: dict[str, int]) -> None:
        del self._requests[request.attempt_id]
        request.ended = True
        self._on_end(RequestOutcome(request.id, code, prompt_tokens, request.delivered.count, stages), request)
