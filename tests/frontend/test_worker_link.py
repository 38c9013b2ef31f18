"""The link to the workers: what a request is given, told and cannot be, until it has ended once."""

from typing import Any

import pytest
from msgspec.structs import replace

from ipc.errors import InvalidArgument
from runtime.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    Unavailable,
    UnknownCollection,
    WorkerLost,
)
from runtime.serving.frontend.requests import ClientDisconnected, RequestOutcome
from runtime.serving.messages import Cancel, Failed, Retrieval, Retrieved, Tokens, encode
from tests.frontend.fakes import PASSAGES, Worker, run
from tests.frontend.links import EPOCH, Stand, ending, standing


def test_a_request_travels_to_its_workers_and_its_pieces_travel_back() -> None:
    async def test() -> None:
        async with standing() as stand:
            assert stand.link.missing() == ["prefill", "decode"]
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            assert stand.link.missing() == []
            request = stand.submit(prompt=(1, 2, 3))
            sent = await prefill.hear_prefill()
            assert (sent.request_id, sent.frontend_epoch, sent.generation.prompt) == ("r1", EPOCH, (1, 2, 3))
            assert (sent.decode_worker, sent.decode_endpoint) == ("d0", decode.me.endpoint)
            assert sent.generation.deadline_ns - sent.generation.received_ns == 60 * 10**9
            found = Retrieved("r1", PASSAGES)
            await prefill.say(found)
            await prefill.settle()
            await decode.say(Tokens("r1", "a", (5,)))
            assert await request.next() == found
            assert await request.next() == Tokens("r1", "a", (5,))
            last = Tokens("r1", "b", (6, 7), "stop", 3, {"end": 9})
            await decode.say(last)
            assert await request.next() == last
            assert stand.ended == [RequestOutcome("r1", "stop", 3, 3, {"end": 9})]
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
            assert isinstance(await ending(request), ClientDisconnected)
            assert [await prefill.hear(), await decode.hear()] == [Cancel("r1"), Cancel("r1")]
            # The hand-over overtook the Cancel: decode goes on with what is over.
            await decode.say(Tokens("r1", "a", (5,)))
            assert await decode.hear() == Cancel("r1")
            assert stand.codes == ["client_closed_request"]
            assert stand.link.statistics().stale == 1

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
            assert await request.next() == Tokens("r1", "right", (5,), "stop")

    run(test())


def test_a_request_ends_at_its_deadline_wherever_it_is() -> None:
    async def test() -> None:
        async with standing() as stand:
            prefill, decode = await stand.worker("prefill", "p0"), await stand.worker("decode", "d0")
            early, late = stand.submit("r1", timeout_s=0.5), stand.submit("r2", timeout_s=0.9)
            await decode.say(Tokens("r2", "a", (5, 6)))
            await decode.settle()
            stand.clock.advance(0.5)
            stand.link.tick()
            first = await ending(early)
            assert isinstance(first, DeadlineExceeded)
            assert first.message == "the request's deadline passed in prefill, after 0 tokens"
            stand.clock.advance(0.4)
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
            stand.clock.advance(1)
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


def test_a_flood_of_malformed_messages_and_impossible_workers_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with standing() as stand:
            worker = await stand.worker("prefill", "p0")
            impossible = encode(replace(worker.me, slots=0))
            for _ in range(100):
                for frames in ((b"\xc1",), (b"x", b"y"), (impossible,)):
                    await worker.say_raw(*frames)
            await worker.settle()
            assert stand.link.statistics().malformed == 300
            assert [record.levelname for record in caplog.records] == ["WARNING"]

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
