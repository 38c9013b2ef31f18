"""The link to the workers: greetings, epochs, deaths, deadlines. Every request ends exactly once."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.errors import InvalidArgument
from runtime.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    TrinityError,
    Unavailable,
    UnknownCollection,
    WorkerLost,
)
from runtime.serving.frontend import worker_link
from runtime.serving.frontend.requests import ClientGone, Ended, Request
from runtime.serving.frontend.router import Router
from runtime.serving.frontend.starts import RestartLimits
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.messages import (
    Cancel,
    Failed,
    Hello,
    Release,
    Retrieval,
    Retrieved,
    Role,
    Sampling,
    Tokens,
    ToWorker,
    Welcome,
    encode,
)
from tests.frontend.fakes import PASSAGES, Clock, Worker, endpoint, run

EPOCH = 77
LOST_AFTER = 10.0
RESTART_WAIT = 30.0


class Stand:
    """A link under a clock that stands still, and the workers that a test connects to it."""

    def __init__(
        self, max_in_flight: int = 64, at: str = "", kind: type[WorkerLink] = WorkerLink, restarts: int = 0
    ) -> None:
        self.clock = Clock()
        self.ended: list[Ended] = []
        self.router = Router(max_in_flight=max_in_flight, seed=1)
        self.link = kind(
            at or endpoint(),
            self.router,
            epoch=EPOCH,
            clock=self.clock,
            lost_after_ns=int(LOST_AFTER * 1e9),
            on_end=self.ended.append,
            restarts=RestartLimits(restarts, int(RESTART_WAIT * 1e9)),
        )
        self.workers: list[Worker] = []

    async def worker(self, role: Role, name: str, **options: Any) -> Worker:
        worker = Worker(self.link.endpoint, role, name, **options)
        self.workers.append(worker)
        assert (await worker.hello()).frontend_epoch == EPOCH
        return worker

    def submit(self, request_id: str = "r1", timeout_s: float = 60.0, **options: Any) -> Request:
        options = {"prompt": "hello", "sampling": Sampling(max_tokens=8), **options}
        now = self.clock()
        return self.link.submit(request_id, received_ns=now, deadline_ns=now + int(timeout_s * 1e9), **options)

    @property
    def codes(self) -> list[str]:
        return [ended.code for ended in self.ended]


@contextlib.asynccontextmanager
async def standing(**options: Any) -> AsyncIterator[Stand]:
    stand = Stand(**options)
    running = asyncio.create_task(stand.link.run())
    try:
        yield stand
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for worker in stand.workers:
            worker.close()
        stand.link.close()


async def ending(request: Request) -> TrinityError:
    """What ended the request; pieces before it are thrown away."""
    try:
        while True:
            await request.next()
    except TrinityError as error:
        return error


def test_a_request_travels_to_its_workers_and_its_pieces_travel_back() -> None:
    async def test() -> None:
        async with standing() as stand:
            assert stand.link.missing() == ["prefill", "decode"]
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            assert stand.link.missing() == []
            request = stand.submit(prompt=(1, 2, 3))
            sent = await prefill.hear_prefill()
            assert (sent.request_id, sent.frontend_epoch, sent.prompt) == ("r1", EPOCH, (1, 2, 3))
            assert (sent.decode_worker, sent.decode_endpoint) == ("d0", decode.me.endpoint)
            assert sent.deadline_ns - sent.received_ns == 60 * 10**9
            found = Retrieved("r1", PASSAGES)
            await prefill.say(found)
            await prefill.settle()
            await decode.say(Tokens("r1", "a", (5,)))
            assert await request.next() == found
            assert await request.next() == Tokens("r1", "a", (5,))
            await decode.say(Tokens("r1", "b", (6, 7), "stop", 3, {"end": 9}))
            assert (await request.next()).finish_reason == "stop"  # type: ignore[union-attr]
            assert stand.ended == [Ended("r1", "stop", 3, 3, {"end": 9})]
            assert (len(stand.link.requests), stand.router.in_flight) == (0, 0)

    run(test())


def test_an_error_that_a_worker_reports_ends_the_request_as_that_error_and_the_other_worker_forgets_it() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit()
            await prefill.say(Failed("r1", "unknown_collection", "no 'x'", "retrieval.collection"))
            error = await ending(request)
            assert isinstance(error, UnknownCollection)
            assert (error.message, error.param) == ("no 'x'", "retrieval.collection")
            assert await decode.hear() == Cancel("r1")
            unknown = stand.submit("r2")
            await decode.say(Failed("r2", "no such code", "?"))
            assert isinstance(await ending(unknown), InternalError)
            assert stand.codes == ["unknown_collection", "internal_error"]

    run(test())


def test_without_a_worker_of_each_role_nothing_is_accepted() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            with pytest.raises(Unavailable, match="decode"):
                stand.submit()
            assert stand.router.in_flight == 0

    run(test())


def test_a_prompt_of_token_ids_and_its_answer_must_fit_the_context_together() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0", limit=20)
            await stand.worker("decode", "d0", limit=20)
            stand.submit(prompt=tuple(range(12)))
            with pytest.raises(ContextLengthExceeded, match="at least 21 tokens, the model's context holds 20"):
                stand.submit("r2", prompt=tuple(range(13)))

    run(test())


def test_a_cancelled_request_is_forgotten_by_both_workers_and_late_pieces_are_answered_with_cancel() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit()
            await prefill.hear_prefill()
            stand.link.cancel(request)
            stand.link.cancel(request)
            assert isinstance(await ending(request), ClientGone)
            assert [await prefill.hear(), await decode.hear()] == [Cancel("r1"), Cancel("r1")]
            # The hand-over overtook the Cancel: decode goes on with what is over.
            await decode.say(Tokens("r1", "a", (5,)))
            assert await decode.hear() == Cancel("r1")
            assert stand.codes == ["client_closed_request"]
            assert stand.link.statistics().stale == 1

    run(test())


def test_a_worker_whose_connection_is_gone_is_lost_long_before_the_limit_on_silence() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit()
            await prefill.hear_prefill()
            decode.close()
            stand.clock.forward(1.1)
            await prefill.settle()
            while not stand.codes:  # the socket learns of the end in a thread of its own
                stand.link.tick()
                await asyncio.sleep(0)
            assert stand.link.missing() == ["decode"]
            error = await ending(request)
            assert isinstance(error, WorkerLost)
            assert error.message == "decode worker 'd0' was lost: its connection is gone"

    run(test())


def test_a_silent_worker_is_lost_with_its_requests_and_comes_back_with_its_next_report() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit()
            await prefill.hear_prefill()
            stand.clock.forward(LOST_AFTER)
            await prefill.settle()
            stand.link.tick()
            assert stand.link.missing() == []
            stand.clock.forward(0.1)
            stand.link.tick()
            assert stand.link.missing() == ["decode"]
            error = await ending(request)
            assert isinstance(error, WorkerLost)
            assert error.message == "decode worker 'd0' was lost: silent for 10.1 s, the limit is 10.0 s"
            assert await prefill.hear() == Cancel("r1")
            assert await decode.hear() == Welcome(EPOCH)  # it was asked whether it is still there
            assert await decode.hear() == Cancel("r1")  # for when it wakes
            await decode.report(EPOCH)
            await decode.settle()
            assert stand.link.missing() == []
            stand.submit("r2")
            assert stand.codes == ["worker_lost"]

    run(test())


def test_a_draining_worker_is_released_when_nothing_is_placed_on_it_any_more_and_gets_nothing_new() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit()  # on its way to prefill: decode has not heard of it yet
            await prefill.hear_prefill()
            await decode.report(EPOCH, draining=True)
            await decode.report(0)
            assert await decode.hear() == Welcome(EPOCH)  # and no release before it
            other = await stand.worker("decode", "d1")
            assert stand.submit("r2").placement.decode == "d1"
            await decode.say(Tokens("r1", "a", (5,), "stop", 3, {}))
            assert (await request.next()).finish_reason == "stop"  # type: ignore[union-attr]
            await decode.report(EPOCH, draining=True)
            assert await decode.hear() == Release()
            await other.settle()

    run(test())


def test_passages_come_before_tokens_even_if_decode_is_heard_first() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit(retrieval=Retrieval("docs"))
            early: list[Any] = [
                Tokens("r1", "a", (5,)),
                Retrieved("r1", PASSAGES[:1], 1),
                Tokens("r1", "b", (6,), "stop"),
            ]
            for piece in early:
                await decode.say(piece)
            await decode.settle()
            assert stand.codes == []
            await prefill.say(Retrieved("r1", ()))
            assert [await request.next() for _ in range(4)] == [Retrieved("r1", ()), *early]
            assert stand.codes == ["stop"]

    run(test())


def test_a_prefill_worker_that_is_lost_before_its_passages_are_heard_ends_the_request() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            decode = await stand.worker("decode", "d0")
            request = stand.submit(retrieval=Retrieval("docs"))
            await decode.say(Tokens("r1", "a", (5,), "stop"))
            await decode.settle()
            stand.link.lost("p0", "killed")
            assert isinstance(await ending(request), WorkerLost)
            assert stand.codes == ["worker_lost"]
            assert await decode.hear() == Cancel("r1")

    run(test())


def test_a_restarted_worker_may_keep_its_sockets_identity() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("decode", "d0")
            await stand.worker("prefill", "p0", identity=b"p0")
            again = await stand.worker("prefill", "p0", identity=b"p0", epoch=2)
            stand.submit()
            assert (await again.hear_prefill()).request_id == "r1"

    run(test())


def test_a_prefill_worker_is_not_needed_any_more_once_decode_speaks() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            decode = await stand.worker("decode", "d0")
            request = stand.submit()
            await decode.say(Tokens("r1", "a", (5,)))
            await request.next()
            stand.link.lost("p0", "killed")
            await decode.say(Tokens("r1", "b", (6,), "stop", 1))
            await request.next()
            assert stand.codes == ["stop"]

    run(test())


def test_a_new_process_under_an_old_name_ends_the_old_ones_requests_once() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, _ = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit()
            await prefill.hear_prefill()
            again = await stand.worker("decode", "d0", epoch=2)
            error = await ending(request)
            assert (type(error), error.message) == (WorkerLost, "decode worker 'd0' was lost: it was started anew")
            assert await prefill.hear() == Cancel("r1")
            stand.link.lost("d0", "the supervisor says so too")
            await again.hello()
            assert stand.codes == ["worker_lost"]
            stand.submit("r2")
            assert (await prefill.hear_prefill()).request_id == "r2"

    run(test())


def test_what_a_process_that_was_replaced_still_says_is_dropped() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            old = await stand.worker("decode", "d0")
            new = await stand.worker("decode", "d0", epoch=2)
            request = stand.submit()
            await old.say(Tokens("r1", "wrong", (5,), "stop"))
            assert await old.hear() == Welcome(EPOCH)
            await new.say(Tokens("r1", "right", (5,), "stop"))
            assert (await request.next()).text == "right"  # type: ignore[union-attr]

    run(test())


def test_a_worker_cannot_speak_for_a_request_that_another_one_has() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            workers = {name: await stand.worker("decode", name) for name in ("d0", "d1")}
            request = stand.submit()
            mine = workers.pop(request.placement.decode)
            (other,) = workers.values()
            await other.say(Tokens("r1", "wrong", (5,)))
            assert await other.hear() == Cancel("r1")
            await mine.say(Tokens("r1", "right", (5,), "stop"))
            assert (await request.next()).text == "right"  # type: ignore[union-attr]

    run(test())


def test_a_worker_of_the_frontend_before_is_welcomed_and_introduces_itself() -> None:
    async def test() -> None:
        async with standing() as stand:
            worker = Worker(stand.link.endpoint, "prefill", "p0")
            stand.workers.append(worker)
            await worker.report(EPOCH - 1)
            assert await worker.hear() == Welcome(EPOCH)
            await worker.say(Tokens("of the last frontend", "a", (1,)))
            assert await worker.hear() == Welcome(EPOCH)
            assert stand.link.missing() == ["prefill", "decode"]
            await worker.hello()
            await worker.hello()
            assert stand.link.missing() == ["decode"]

    run(test())


def test_a_worker_that_comes_back_over_another_connection_has_lost_its_requests_but_not_its_place() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            request = stand.submit()
            await prefill.hear_prefill()
            decode.reconnect(stand.link.endpoint)
            await decode.report(EPOCH)
            assert await decode.hear() == Welcome(EPOCH)
            error = await ending(request)
            assert error.message == "decode worker 'd0' was lost: its connection was renewed"
            again = stand.submit("r2")
            await decode.say(Tokens("r2", "a", (5,), "stop"))
            assert (await again.next()).text == "a"  # type: ignore[union-attr]

    run(test())


def test_workers_that_are_gone_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "MAX_WORKERS", 2)

    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            await stand.worker("prefill", "p1")
            third = Worker(stand.link.endpoint, "prefill", "p2")
            stand.workers.append(third)
            await third.say(third.me)
            await third.settle()
            assert stand.link.statistics().workers["prefill"] == 2
            stand.link.lost("p0", "killed")
            await third.hello()
            assert stand.link.statistics().workers["prefill"] == 2

    run(test())


def test_a_worker_whose_connection_is_gone_is_lost_at_the_next_request_which_another_one_takes() -> None:
    async def test() -> None:
        async with standing() as stand:
            first, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            first.close()
            stand.workers.remove(first)
            second = await stand.worker("prefill", "p1")
            # Nothing tells the frontend of the closed connection until it sends; ZeroMQ notices soon after the close.
            for number in range(10_000):
                stand.submit(f"r{number}")
                if stand.link.statistics().lost_workers:
                    break
                await decode.settle()
            assert stand.link.statistics().workers == {"prefill": 1, "decode": 1}
            assert (await second.hear_prefill()).request_id.startswith("r")

    run(test())


def test_a_request_ends_at_its_deadline_wherever_it_is() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            early, late = stand.submit("r1", timeout_s=0.5), stand.submit("r2", timeout_s=0.9)
            await decode.say(Tokens("r2", "a", (5, 6)))
            await decode.settle()
            stand.clock.forward(0.5)
            stand.link.tick()
            first = await ending(early)
            assert isinstance(first, DeadlineExceeded)
            assert first.message == "the request's deadline passed in prefill, after 0 tokens"
            stand.clock.forward(0.4)
            stand.link.tick()
            assert (await ending(late)).message == "the request's deadline passed in decode, after 2 tokens"
            assert [await decode.hear(), await decode.hear()] == [Cancel("r1"), Cancel("r2")]
            assert [type(await prefill.hear()).__name__ for _ in range(4)] == ["Prefill", "Prefill", "Cancel", "Cancel"]
            assert stand.codes == ["deadline_exceeded"] * 2

    run(test())


def test_the_link_ticks_by_itself() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            await stand.worker("decode", "d0")
            request = stand.submit(timeout_s=1)
            stand.clock.forward(1)
            assert isinstance(await ending(request), DeadlineExceeded)

    run(test())


def test_requests_in_flight_end_when_the_link_stops() -> None:
    async def test() -> None:
        async with standing() as stand:
            await stand.worker("prefill", "p0")
            await stand.worker("decode", "d0")
            request = stand.submit()
        assert isinstance(await ending(request), WorkerLost)

    run(test())


@pytest.mark.parametrize("frames", [(b"",), (b"\xc1",), (b"\x80",), (b"x", b"y"), (b"\x93\x01\x02\x03",)])
def test_a_malformed_message_is_counted_and_changes_nothing(frames: tuple[bytes, ...]) -> None:
    async def test() -> None:
        async with standing() as stand:
            worker = await stand.worker("prefill", "p0")
            await worker.say_raw(*frames)
            await worker.settle()
            assert stand.link.statistics().malformed == 1

    run(test())


@pytest.mark.parametrize("hello", [{"slots": 0}, {"name": "p" * 1000}])
def test_a_worker_that_cannot_be_is_refused(hello: dict[str, Any]) -> None:
    async def test() -> None:
        async with standing() as stand:
            strange = Worker(stand.link.endpoint, "prefill", **({"name": "p0"} | hello))
            stand.workers.append(strange)
            await strange.say(strange.me)
            await strange.settle()
            assert stand.link.missing() == ["prefill", "decode"]

    run(test())


def test_an_endpoint_in_use_is_an_error() -> None:
    async def test() -> None:
        async with standing() as stand:
            with pytest.raises(InvalidArgument, match="in use"):
                Stand(at=stand.link.endpoint)

    run(test())


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
