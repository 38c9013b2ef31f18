"""Properties of the worker link: every request ends exactly once, and its answer has every token exactly once."""

import contextlib
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.errors import TrinityError
from runtime.serving.frontend.requests import Piece, Request
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.messages import (
    Cancel,
    Failed,
    Hello,
    Prefill,
    Retrieval,
    Retrieved,
    Sampling,
    ToFrontend,
    Tokens,
    ToWorker,
    encode,
)
from tests.frontend.fake_workers import PASSAGES, run
from tests.frontend.link_harness import LinkHarness


class Wired(WorkerLink):
    """Records attempted sends and the requests that reached each worker. A send to a `dead` identity fails."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[tuple[bytes, ToWorker]] = []
        self.begun: set[str] = set()
        self.dead: set[bytes] = set()

    def _send_to(self, identity: bytes, message: ToWorker) -> bool:
        self.sent.append((identity, message))
        if identity in self.dead:
            return False
        if isinstance(message, Prefill):
            self.begun.add(message.request_id)
        return True


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


# The fourth is sent to a worker whose connection is gone, so to none, and waits until its client leaves.
UNHEARD = [*[("submit", 0)] * 3, ("lost", "p0"), ("disconnect", "p1"), ("submit", 0), ("cancel", 0)]


@given(st.lists(EVENTS, min_size=10, max_size=60), st.integers(0, 2))
@example(UNHEARD, 1)
@settings(max_examples=60)
def test_every_request_ends_exactly_once(events: list[tuple[Any, ...]], restarts: int) -> None:
    async def test() -> None:
        harness = LinkHarness(max_in_flight=6, link_class=Wired, restarts=restarts)
        link, names = harness.link, ("p0", "p1", "d0", "d1")
        assert isinstance(link, Wired)

        def receive(name: str, message: Any) -> None:
            link.handle([name.encode(), encode(message)])

        def recent(back: int, sender: str = "") -> tuple[str, str]:
            """Return a request's id and the sender of the message."""
            if back >= len(requests):
                return "unknown", "d0"
            request = requests[-1 - back]
            return request.attempt_id, getattr(request.placement, sender, sender)

        requests: list[Request] = []
        try:
            for name in names:
                receive(name, _hello(name, 1))
            for event, *details in events:
                match event, *details:
                    case "submit", timeout:
                        with contextlib.suppress(TrinityError):
                            requests.append(harness.submit(f"r{len(requests)}", timeout_s=timeout * 3 + 1))
                    case "cancel", back if back < len(requests):
                        link.cancel(requests[-1 - back])
                    case "tokens", back, sender, last:
                        request_id, name = recent(back, sender)
                        receive(name, Tokens(request_id, "a", (1,), "stop" if last else None))
                    case "retrieved", back, sender:
                        request_id, name = recent(back, sender)
                        receive(name, Retrieved(request_id, PASSAGES))
                    case "failed", back, sender:
                        request_id, name = recent(back, sender)
                        receive(name, Failed(request_id, "internal_error", "broken"))
                    case "hello", name, epoch:
                        link.dead.discard(name.encode())
                        receive(name, _hello(name, epoch))
                    case "disconnect", name:
                        link.dead.add(name.encode())
                    case "lost", name:
                        link.worker_lost(name, "killed")
                    case "forward", seconds:
                        harness.clock.advance(seconds)
                        link.tick()
                held: Counter[str] = Counter()
                for request in requests:
                    assert request.attempts <= restarts
                    if request.placed:
                        assert not request.ended
                        held.update([request.placement.decode] + [request.placement.prefill] * (not request.prefilled))
                answering = {worker.hello.worker: worker.assigned for worker in harness.router.workers()}
                assert held == Counter(answering)
                open_ids = {request.id for request in requests if not request.ended}
                ended = Counter(ended.request_id for ended in harness.ended)
                assert set(ended) == {request.id for request in requests} - open_ids
                assert set(ended.values()) <= {1}
                assert len(link.requests) == len(open_ids)
                assert harness.router.in_flight == sum(request.placed for request in requests)
            harness.clock.advance(1000)
            link.tick()
            assert len(link.requests) == harness.router.in_flight == 0
            assert len(harness.ended) == len(requests)
            told = {(name.decode(), sent.request_id) for name, sent in link.sent if isinstance(sent, Cancel)}
            for request in requests:
                code = next(ended.code for ended in harness.ended if ended.request_id == request.id)
                # One that has only waited for a worker has reached none that would have to be told.
                if request.id in link.begun and code in ("client_closed_request", "deadline_exceeded"):
                    # The last attempt that was sent: one that waited for workers in the end has a later number.
                    at = (request.placement.prefill, request.placement.decode)
                    ids = [request.id, *(f"{request.id}~{number}" for number in range(1, request.attempts + 1))]
                    assert any({(name, attempt) for name in at} <= told for attempt in ids[-2:])
        finally:
            link.close()

    run(test())


def _hello(name: str, epoch: int) -> Hello:
    return Hello("prefill" if name[0] == "p" else "decode", name, epoch, 1, 4, 100, f"ipc://@{name}")


@dataclass
class Attempt:
    """State of one attempt's workers: the prompt's passages, and a row with its next token."""

    prefill: str
    told: Prefill
    drawn: int
    found: bool

    def find(self) -> Retrieved:
        self.found = True
        return Retrieved(self.told.request_id, PASSAGES[:1])

    def draw(self) -> Tokens:
        """The next token is its own number."""
        token, self.drawn = self.drawn, self.drawn + 1
        finish: Any = "length" if self.drawn == self.told.generation.sampling.max_tokens else None
        return Tokens(self.told.request_id, "a", (token,), finish, prompt_token_ids=(7, 8, 9) if token == 0 else ())


NAMES = ("p0", "p1", "d0", "d1")
ATTEMPT = st.integers(0, 5)  # counted back from the one that was sent last
PROGRESS = st.one_of(
    *[st.tuples(st.just("draw"), ATTEMPT)] * 4,
    *[st.tuples(st.just("arrive"), st.sampled_from(NAMES))] * 4,
    *[st.tuples(st.just("find"), ATTEMPT)] * 2,
    st.tuples(st.just("refuse"), ATTEMPT),
    st.tuples(st.just("lost"), st.sampled_from(NAMES)),
    st.tuples(st.just("hello"), st.sampled_from(NAMES)),
)


@given(st.lists(PROGRESS, min_size=10, max_size=80), st.lists(st.booleans(), min_size=1, max_size=3))
@settings(max_examples=60)
def test_no_token_is_duplicated_or_missing_under_losses_and_late_messages(
    events: list[tuple[str, Any]], retrieves: list[bool]
) -> None:
    """Abandoned workers keep writing, and their messages may arrive long after they were lost."""

    async def test() -> None:
        harness = LinkHarness(link_class=Wired, restarts=1000)
        link = harness.link
        assert isinstance(link, Wired)
        epochs = Counter(NAMES)
        attempts: list[Attempt] = []
        wires: dict[str, deque[ToFrontend]] = {name: deque() for name in NAMES}

        def receive(name: str, message: ToFrontend) -> None:
            link.handle([name.encode(), encode(message)])
            link.tick()
            for identity, sent in link.sent:
                if isinstance(sent, Prefill):
                    drawn = len(sent.resume.generated) if sent.resume else 0
                    found = sent.generation.retrieval is None or sent.resume is not None
                    attempts.append(Attempt(identity.decode(), sent, drawn, found))
            link.sent.clear()

        def act(event: str, what: Any) -> None:
            attempt = attempts[-1 - what] if isinstance(what, int) and what < len(attempts) else None
            match event:
                case "draw" if attempt is not None and attempt.drawn < attempt.told.generation.sampling.max_tokens:
                    wires[attempt.told.decode_worker].append(attempt.draw())
                case "find" if attempt is not None and not attempt.found:
                    wires[attempt.prefill].append(attempt.find())
                case "refuse" if attempt is not None:
                    wires[attempt.prefill].append(Failed(attempt.told.request_id, "worker_lost", "not taken"))
                case "arrive" if wires[what]:
                    receive(what, wires[what].popleft())
                case "lost":
                    link.worker_lost(what, "killed")
                case "hello":
                    epochs[what] += 1
                    receive(what, _hello(what, epochs[what]))

        try:
            for name in NAMES:
                receive(name, _hello(name, 1))
            requests = [
                harness.submit(
                    f"r{number}", sampling=Sampling(max_tokens=6), retrieval=Retrieval("docs") if retrieve else None
                )
                for number, retrieve in enumerate(retrieves)
            ]
            for event, what in events:
                act(event, what)
                for request in requests:
                    assert request.delivered.tokens == list(range(len(request.delivered.tokens)))
            for name in NAMES:
                act("hello", name)
            for _ in range(200):  # far more than what is on the wires
                for back in range(len(attempts)):
                    act("find", back)
                    act("draw", back)
                for name in NAMES:
                    act("arrive", name)
            assert harness.codes == ["length"] * len(requests)
            for request, retrieve in zip(requests, retrieves, strict=True):
                pieces: list[Piece] = []
                while not (pieces and isinstance(pieces[-1], Tokens) and pieces[-1].finish_reason):
                    pieces.append(await request.next())
                assert [token for piece in pieces if isinstance(piece, Tokens) for token in piece.token_ids] == [
                    *range(6)
                ]
                assert [isinstance(piece, Retrieved) for piece in pieces] == [True] * retrieve + [False] * 6
        finally:
            link.close()

    run(test())
