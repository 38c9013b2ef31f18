"""Whatever workers, clients and the clock do: every request ends exactly once."""

import contextlib
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import TrinityError
from runtime.serving.frontend.requests import Request
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.messages import Cancel, Failed, Hello, Retrieved, Tokens, ToWorker, encode
from tests.frontend.fakes import PASSAGES, run
from tests.frontend.links import Stand


class Wired(WorkerLink):
    """A link that notes what it tries to send. A `dead` identity cannot be sent to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[tuple[bytes, ToWorker]] = []
        self.dead: set[bytes] = set()

    def _send_to(self, identity: bytes, message: ToWorker) -> bool:
        self.sent.append((identity, message))
        return identity not in self.dead


# Requests are named by how long ago they were accepted; a message comes from one of the request's own workers
# ("prefill", "decode") or from any.
SENDER = st.sampled_from(["prefill", "decode", "decode", "p0", "d1"])
RECENT = st.integers(0, 4)
EVENTS = st.one_of(
    *[st.tuples(st.just("submit"), st.integers(0, 3))] * 3,
    *[st.tuples(st.just("tokens"), RECENT, SENDER, st.booleans())] * 2,
    st.tuples(st.just("cancel"), RECENT),
    st.tuples(st.just("retrieved"), RECENT, SENDER),
    st.tuples(st.just("failed"), RECENT, SENDER),
    st.tuples(st.just("hello"), st.sampled_from(["p0", "p1", "d0", "d1"]), st.integers(1, 3)),
    st.tuples(st.just("lost"), st.sampled_from(["p0", "p1", "d0", "d1"])),
    st.tuples(st.just("disconnect"), st.sampled_from(["p0", "p1", "d0", "d1"])),
    st.tuples(st.just("forward"), st.integers(1, 8)),
)


@given(st.lists(EVENTS, min_size=10, max_size=60), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_every_request_ends_exactly_once_whatever_happens(events: list[tuple[Any, ...]], restarts: int) -> None:
    async def test() -> None:
        stand = Stand(max_in_flight=6, kind=Wired, restarts=restarts)
        link, names = stand.link, ("p0", "p1", "d0", "d1")
        assert isinstance(link, Wired)

        def hear(name: str, message: Any) -> None:
            link._receive([name.encode(), encode(message)])

        def recent(back: int, sender: str = "") -> tuple[str, str]:
            """A request's id, and who speaks of it."""
            if back >= len(requests):
                return "unknown", "d0"
            request = requests[-1 - back]
            return request.attempt_id, getattr(request.placement, sender, sender)

        requests: list[Request] = []
        try:
            for name in names:
                hear(name, _hello(name, 1))
            for event, *details in events:
                match event, *details:
                    case "submit", timeout:
                        with contextlib.suppress(TrinityError):
                            requests.append(stand.submit(f"r{len(requests)}", timeout_s=timeout * 3 + 1))
                    case "cancel", back if back < len(requests):
                        link.cancel(requests[-1 - back])
                    case "tokens", back, sender, last:
                        request_id, name = recent(back, sender)
                        hear(name, Tokens(request_id, "a", (1,), "stop" if last else None))
                    case "retrieved", back, sender:
                        request_id, name = recent(back, sender)
                        hear(name, Retrieved(request_id, PASSAGES))
                    case "failed", back, sender:
                        request_id, name = recent(back, sender)
                        hear(name, Failed(request_id, "internal_error", "broken"))
                    case "hello", name, epoch:
                        link.dead.discard(name.encode())
                        hear(name, _hello(name, epoch))
                    case "disconnect", name:
                        link.dead.add(name.encode())
                    case "lost", name:
                        link.lost(name, "killed")
                    case "forward", seconds:
                        stand.clock.forward(seconds)
                        link.tick()
                held: Counter[str] = Counter()
                for request in requests:
                    assert request.attempts <= restarts
                    if request.placed:
                        assert not request.ended
                        held.update([request.placement.decode] + [request.placement.prefill] * (not request.prefilled))
                answering = {worker.hello.worker: worker.assigned for worker in stand.router.workers()}
                assert held == Counter(answering)
                open_ids = {request.id for request in requests if not request.ended}
                ended = Counter(ended.request_id for ended in stand.ended)
                assert set(ended) == {request.id for request in requests} - open_ids
                assert set(ended.values()) <= {1}
                assert len(link.requests) == len(open_ids)
                assert stand.router.in_flight == sum(request.placed for request in requests)
            stand.clock.forward(1000)
            link.tick()
            assert len(link.requests) == stand.router.in_flight == 0
            assert len(stand.ended) == len(requests)
            told = {(name.decode(), sent.request_id) for name, sent in link.sent if isinstance(sent, Cancel)}
            for request in requests:
                code = next(ended.code for ended in stand.ended if ended.request_id == request.id)
                if code in ("client_closed_request", "deadline_exceeded"):
                    # The last attempt that was sent: one that waited for workers in the end has a later number.
                    at = (request.placement.prefill, request.placement.decode)
                    ids = [request.id, *(f"{request.id}~{number}" for number in range(1, request.attempts + 1))]
                    assert any({(name, attempt) for name in at} <= told for attempt in ids[-2:])
        finally:
            link.close()

    run(test())


def _hello(name: str, epoch: int) -> Hello:
    return Hello("prefill" if name[0] == "p" else "decode", name, epoch, 1, 4, 100, f"ipc://@{name}")
