"""Requests that wait for their filters to be resolved, beside the pool's loop.

```
  UNKNOWN_FILTER ─▶ known to `Scopes`? ─ yes ─▶ cached for the client: the loop reads the request again
                      └─ no ─▶ set aside ─▶ FilterResolver ─▶ FILTERS_RESOLVED ─▶ scope ─▶ enqueued
                                  │                                    └─▶ an error: the request ends with its status
                                  └─▶ cancelled, expired, or its client is gone
```
Each request that was set aside ends exactly once, or is enqueued exactly once.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ipc import SessionServer
from ipc.server.server import SetAside
from runtime.errors import DeadlineExceeded, Overloaded, TrinityError
from runtime.pool.collections.resolver import NEVER_NS, FilterResolver, Resolution
from runtime.pool.collections.scopes import InUse, Scopes

MOST_WAITING = 1024
"""Requests that may wait for filters. A flow may have as many waiting as are free, so that one leaves room."""
_MOST_ATTEMPTS = 8  # evaluations of a filter whose collection is sealed or merged each time
_SHORT_BYTES = 512  # of a filter; longer ones of a flow are one of their own
End = Callable[["WaitingRequest", str], None]


@dataclass(eq=False)
class WaitingRequest:
    """A request that waits for its filter since `received_ns`."""

    aside: SetAside
    encoded: bytes
    received_ns: int
    attempts: int = 0

    @property
    def row(self) -> int:
        return self.aside.request.row

    @property
    def flow(self) -> tuple[int, int]:
        """Its client, and what the client shares fairly: API keys."""
        return self.row, self.aside.request.flow

    @property
    def request_id(self) -> int:
        return self.aside.request.request_id

    @property
    def collection(self) -> int:
        """The collection's number in the client table."""
        return self.aside.request.collection

    @property
    def deadline_ns(self) -> int:
        return self.aside.request.deadline_ns or NEVER_NS


class FilteredRequests:
    """The requests that wait. end: ends one with a status. All methods are the loop's."""

    def __init__(
        self, server: SessionServer, scopes: Scopes, resolver: FilterResolver[WaitingRequest], end: End
    ) -> None:
        self._server, self._scopes, self._resolver, self._end = server, scopes, resolver, end
        self._count: Counter[tuple[int, int]] = Counter()  # of waiting requests, by flow

    def __len__(self) -> int:
        return self._count.total()

    def receive(self, now_ns: int) -> None:
        """Handle the current request, whose filter has no number in its client's cache."""
        encoded = self._server.request_filter()
        if encoded is None:
            return
        request = self._server.request
        number = self._scopes.number_of(request.collection, encoded)
        if number is not None:
            self._server.cache_filter(number)
        elif self._scopes.collection(request.collection) is None:
            self._server.refuse("invalid_request")
        elif self._is_full((request.row, request.flow)):
            self._server.refuse("overloaded")
        else:
            self._wait(WaitingRequest(self._server.set_aside(), encoded, now_ns))

    def _is_full(self, flow: tuple[int, int]) -> bool:
        return self._count[flow] >= MOST_WAITING - len(self)

    def _wait(self, request: WaitingRequest) -> None:
        self._count[request.flow] += 1
        self._resolve([request])

    def _resolve(self, requests: list[WaitingRequest]) -> None:
        """Let requests with one filter wait for its resolution."""
        first = requests[0]
        filterable = self._scopes.collection(first.collection)
        if filterable is None:  # a hostile client's: no session has it any more
            for request in requests:
                self._finish(request, "invalid_request")
            return
        flow = *first.flow, len(first.encoded) > _SHORT_BYTES
        latest_ns = max(request.deadline_ns for request in requests)
        self._resolver.wait_for(first.collection, first.encoded, filterable, flow, requests, latest_ns)

    # ---- resolved filters

    def resolved(
        self, now_ns: int, in_use: Callable[[], InUse], invalidate: Callable[[list[int]], None]
    ) -> Iterator[WaitingRequest]:
        """Yield the requests whose filters are resolved, each to be enqueued as the current request at once.

        in_use, invalidate: as in `Scopes`.
        """
        for resolution in self._resolver.take_done():
            if not resolution.waiting:
                continue
            number = self._scope(resolution, now_ns, in_use(), invalidate)
            if number is None:
                continue
            for request in resolution.waiting:
                self._forget(request)
                self._server.resume(request.aside)
                self._server.request.scope = number
                yield request
            if not resolution.shared:
                self._scopes.retire(number)

    def _scope(
        self,
        resolution: Resolution[WaitingRequest],
        now_ns: int,
        in_use: InUse,
        invalidate: Callable[[list[int]], None],
    ) -> int | None:
        """Return the scope of a resolved filter. Otherwise its requests end, or wait for another evaluation."""
        outcome, error = resolution.outcome, None
        try:
            assert outcome is not None
            if isinstance(outcome, TrinityError):
                raise outcome
            if self._scopes.collection(resolution.collection) is not resolution.filterable:
                error = "invalid_request"
            elif (parts := outcome()) is not None:
                encoded = resolution.encoded if resolution.shared else b""
                number, evicted = self._scopes.add(resolution.collection, encoded, parts, in_use)
                invalidate(evicted)
                return number
        except DeadlineExceeded:
            pass  # of requests that wait no more; others may have come since
        except TrinityError as raised:
            error = "overloaded" if isinstance(raised, Overloaded) else "invalid_request"
        again: list[WaitingRequest] = []
        for request in resolution.waiting:
            request.attempts += 1
            late = "deadline_exceeded" if request.deadline_ns <= now_ns else None
            many = "overloaded" if request.attempts > _MOST_ATTEMPTS else None
            if status := error or late or many:
                self._finish(request, status)
            else:
                again.append(request)
        if again:
            self._resolve(again)
        return None

    # ---- requests that wait no more

    def expire(self, now_ns: int) -> None:
        """End the requests whose deadlines have passed."""
        self._end_where(lambda request: request.deadline_ns <= now_ns, "deadline_exceeded")

    def cancel(self) -> None:
        """Cancel the current request's client's request of that id, if it waits."""
        cancelled = self._server.request
        wanted = cancelled.row, cancelled.request_id
        self._end_where(lambda request: (request.row, request.request_id) == wanted, "cancelled")

    def drop_client(self, row: int) -> None:
        """Drop the requests of a client that is gone."""
        self._end_where(lambda request: request.row == row, None)

    def _end_where(self, ends: Callable[[WaitingRequest], bool], status: str | None) -> None:
        for resolution in self._resolver.unfinished if self._count else ():
            for request in [request for request in resolution.waiting if ends(request)]:
                resolution.waiting.remove(request)
                self._finish(request, status)
            if not resolution.waiting:
                self._resolver.abandon(resolution)

    def _finish(self, request: WaitingRequest, status: str | None) -> None:
        """End a request with a status; None: without an answer."""
        self._forget(request)
        if status is not None:
            self._end(request, status)

    def _forget(self, request: WaitingRequest) -> None:
        self._count[request.flow] -= 1
        if not self._count[request.flow]:
            del self._count[request.flow]

    def changed(self, collection: int) -> None:
        """A collection has changed: see `FilterResolver.changed`."""
        self._resolver.changed(collection)

    def close(self) -> None:
        """Stop the thread."""
        self._resolver.close()
