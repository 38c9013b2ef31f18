"""The frontend's link to the workers: placement, delivery, cancellation and errors of requests."""

from typing import Any

import pytest
from msgspec.structs import replace

from runtime.errors import (
    ContextLengthExceeded,
    InternalError,
    UnknownCollection,
)
from runtime.serving.frontend.requests import ClientDisconnected, RequestOutcome
from runtime.serving.messages import Cancel, Failed, Retrieval, Retrieved, Tokens, encode
from tests.frontend.fake_workers import PASSAGES, FakeWorker
from tests.frontend.link_harness import EPOCH, error_of, running_link


async def test_a_request_reaches_its_workers_and_its_pieces_return() -> None:
    async with running_link() as harness:
        assert harness.link.missing() == ["prefill", "decode"]
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        assert harness.link.missing() == []
        request = harness.submit(prompt=(1, 2, 3))
        sent = await prefill.receive_prefill()
        assert (sent.request_id, sent.frontend_epoch, sent.generation.prompt) == ("r1", EPOCH, (1, 2, 3))
        assert (sent.decode_worker, sent.decode_endpoint) == ("d0", decode.me.endpoint)
        assert sent.generation.deadline_ns - sent.generation.received_ns == 60 * 10**9
        found = Retrieved("r1", PASSAGES)
        await prefill.send(found)
        await prefill.settle()
        await decode.send(Tokens("r1", "a", (5,)))
        assert await request.next() == found
        assert await request.next() == Tokens("r1", "a", (5,))
        last = Tokens("r1", "b", (6, 7), "stop", 3, {"end": 9})
        await decode.send(last)
        assert await request.next() == last
        assert harness.ended == [RequestOutcome("r1", "stop", 3, 3, {"end": 9})]
        assert (len(harness.link.requests), harness.router.in_flight) == (0, 0)


async def test_a_workers_error_ends_the_request_and_cancels_it_at_the_other_worker() -> None:
    async with running_link() as harness:
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        request = harness.submit()
        await prefill.send(Failed("r1", "unknown_collection", "no 'x'", "retrieval.collection"))
        error = await error_of(request)
        assert isinstance(error, UnknownCollection)
        assert (error.message, error.param) == ("no 'x'", "retrieval.collection")
        assert await decode.receive() == Cancel("r1")
        unknown = harness.submit("r2")
        await decode.send(Failed("r2", "no such code", "?"))
        assert isinstance(await error_of(unknown), InternalError)
        assert harness.codes == ["unknown_collection", "internal_error"]


async def test_a_prompt_of_token_ids_plus_its_answer_must_fit_the_context() -> None:
    async with running_link() as harness:
        await harness.worker("prefill", "p0", limit=20)
        await harness.worker("decode", "d0", limit=20)
        harness.submit(prompt=tuple(range(12)))
        with pytest.raises(ContextLengthExceeded, match="at least 21 tokens, the model's context holds 20"):
            harness.submit("r2", prompt=tuple(range(13)))


async def test_a_cancelled_request_is_cancelled_at_both_workers_and_again_on_late_pieces() -> None:
    async with running_link() as harness:
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        request = harness.submit()
        await prefill.receive_prefill()
        harness.link.cancel(request)
        harness.link.cancel(request)
        assert isinstance(await error_of(request), ClientDisconnected)
        assert [await prefill.receive(), await decode.receive()] == [Cancel("r1"), Cancel("r1")]
        # The hand-over overtook the Cancel: decode goes on with what is over.
        await decode.send(Tokens("r1", "a", (5,)))
        assert await decode.receive() == Cancel("r1")
        assert harness.codes == ["client_closed_request"]


async def test_passages_precede_tokens_even_if_decode_reports_first() -> None:
    async with running_link() as harness:
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        request = harness.submit(retrieval=Retrieval("docs"))
        early: list[Any] = [
            Tokens("r1", "a", (5,)),
            Retrieved("r1", PASSAGES[:1], 1),
            Tokens("r1", "b", (6,), "stop"),
        ]
        for piece in early:
            await decode.send(piece)
        await decode.settle()
        assert harness.codes == []
        await prefill.send(Retrieved("r1", ()))
        assert [await request.next() for _ in range(4)] == [Retrieved("r1", ()), *early]
        assert harness.codes == ["stop"]


async def test_a_flood_of_malformed_messages_and_invalid_workers_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_link() as harness:
        worker = await harness.worker("prefill", "p0")
        impossible = encode(replace(worker.me, slots=0))
        for _ in range(100):
            for frames in ((b"\xc1",), (b"x", b"y"), (impossible,)):
                await worker.send_raw(*frames)
        await worker.settle()
        assert harness.link.malformed == 300
        assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("hello", [{"slots": 0}, {"name": "p" * 1000}])
async def test_an_invalid_worker_is_refused(hello: dict[str, Any]) -> None:
    async with running_link() as harness:
        strange = FakeWorker(harness.link.endpoint, "prefill", **({"name": "p0"} | hello))
        harness.workers.append(strange)
        await strange.send(strange.me)
        await strange.settle()
        assert harness.link.missing() == ["prefill", "decode"]
