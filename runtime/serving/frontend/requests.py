"""The requests in flight. Each ends exactly once: finished, failed, cancelled, late, or lost with its worker."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.errors import TrinityError
from runtime.serving.frontend.router import Placement
from runtime.serving.messages import Retrieved, Tokens

Piece = Retrieved | Tokens


class ClientGone(TrinityError):
    """Nobody waits for the answer any more."""

    code = "client_closed_request"
    status = 499


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended: `code` is "stop", "length" or an error's code; `stages` are stamps in monotonic ns."""

    request_id: str
    code: str
    prompt_tokens: int
    completion_tokens: int
    stages: dict[str, int]


@dataclass(slots=True, eq=False)
class Request:
    """One request in flight, as its consumer sees it: pieces in order, then its end.

    What waits here is bounded by the request's own max_tokens, so a slow reader needs no other limit. A request with
    retrieval `awaits_passages`: the prefill worker sends them before the hand-over, but over a connection of its own,
    so the decode worker's first pieces can be here sooner; they are `held` until then.
    """

    id: str
    placement: Placement
    deadline_ns: int
    awaits_passages: bool = False
    completion_tokens: int = 0
    prefilled: bool = False
    ended: bool = False
    held: list[Piece] = field(default_factory=list)
    _pieces: asyncio.Queue[Piece | TrinityError] = field(default_factory=asyncio.Queue)

    async def next(self) -> Piece:
        """The next piece, in order; the last is a `Tokens` with a `finish_reason`. Raises what ended the request."""
        piece = await self._pieces.get()
        if isinstance(piece, TrinityError):
            self._pieces.put_nowait(piece)  # an end stays an end, however often one asks
            raise piece
        return piece

    def put(self, piece: Piece | TrinityError) -> None:
        """For the table alone."""
        self._pieces.put_nowait(piece)


class RequestTable:
    """Requests in flight, by id and by worker. `on_end` is called once for each, after it has left the table."""

    def __init__(self, on_end: Callable[[Ended, Request], None]) -> None:
        self._requests: dict[str, Request] = {}
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, request: Request) -> None:
        """Add a request; its id must be new."""
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in flight already")
        self._requests[request.id] = request

    def get(self, request_id: str) -> Request | None:
        """The request in flight with this id, or None when it never was or has ended."""
        return self._requests.get(request_id)

    def deliver(self, piece: Piece) -> bool:
        """Pass a piece to its request; a `finish_reason` ends it. False when the request is not in flight."""
        request = self._requests.get(piece.request_id)
        if request is None:
            return False
        if not request.awaits_passages:
            self._pass_on(request, piece)
        elif isinstance(piece, Retrieved) and piece.at_token == 0:
            request.awaits_passages = False
            for waiting in (piece, *request.held):
                self._pass_on(request, waiting)
            request.held.clear()
        else:
            request.held.append(piece)
        return True

    def _pass_on(self, request: Request, piece: Piece) -> None:
        if isinstance(piece, Tokens):
            request.completion_tokens += len(piece.token_ids)
        request.put(piece)
        if isinstance(piece, Tokens) and piece.finish_reason is not None:
            self._end(request, piece.finish_reason, piece.prompt_tokens, piece.stages)

    def fail(self, request_id: str, error: TrinityError) -> bool:
        """End a request with an error. False, and nothing happens, when it has ended before."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.put(error)
        self._end(request, error.code, 0, {})
        return True

    def of_worker(self, name: str) -> list[Request]:
        """The requests that would be lost with this worker (a prefill worker's part ends when decode has it)."""
        return [
            request
            for request in self._requests.values()
            if name == request.placement.decode
            or (name == request.placement.prefill and (request.awaits_passages or not request.prefilled))
        ]

    def late(self, now_ns: int) -> list[Request]:
        """The requests whose deadline has passed."""
        return [request for request in self._requests.values() if request.deadline_ns <= now_ns]

    def all(self) -> list[Request]:
        """All requests in flight."""
        return list(self._requests.values())

    def _end(self, request: Request, code: str, prompt_tokens: int, stages: dict[str, int]) -> None:
        del self._requests[request.id]
        request.ended = True
        self._on_end(Ended(request.id, code, prompt_tokens, request.completion_tokens, stages), request)
