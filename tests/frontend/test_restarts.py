"""Requests whose workers die: they resume on other workers without duplicate tokens, up to a retry limit."""

from typing import Any

import pytest
from msgspec.structs import replace

from runtime.errors import ContextLengthExceeded, DeadlineExceeded, Overloaded, Unavailable, WorkerLost
from runtime.serving.frontend.requests import Request
from runtime.serving.messages import Cancel, Failed, Prefill, Resume, Retrieval, Retrieved, Sampling, Tokens
from tests.frontend.fake_workers import PASSAGES, FakeWorker
from tests.frontend.link_harness import RESTART_WAIT_S, LinkHarness, error_of, running_link


async def cast(harness: LinkHarness) -> dict[str, FakeWorker]:
    """Two workers of each role."""
    return {
        name: await harness.worker("prefill" if name[0] == "p" else "decode", name) for name in ("p0", "p1", "d0", "d1")
    }


async def sent(workers: dict[str, FakeWorker], request: Request) -> Prefill:
    """Return the `Prefill` sent for the request's last placement; skip `Cancel` messages."""
    while True:
        message = await workers[request.placement.prefill].receive()
        if isinstance(message, Prefill):
            return message


async def pieces(request: Request, count: int) -> list[Any]:
    return [await request.next() for _ in range(count)]


async def test_an_answer_resumes_on_another_worker_from_the_delivered_tokens() -> None:
    async with running_link(restarts=3) as harness:
        workers = await cast(harness)
        request = harness.submit(sampling=Sampling(max_tokens=8, seed=4), retrieval=Retrieval("docs", every_tokens=2))
        first = await sent(workers, request)
        prefill, decode = workers[first.decode_worker], workers[first.decode_worker]
        await workers[request.placement.prefill].send(Retrieved("r1", PASSAGES[:1]))
        await decode.send(Tokens("r1", "ab", (10, 11), prompt_token_ids=(1, 2, 3), last_probe_at=2))
        await decode.send(Retrieved("r1", PASSAGES[1:], at_token=2, inserted=(90, 91)))
        await decode.send(Tokens("r1", "c", (12,), last_probe_at=2))
        await pieces(request, 4)
        dead = first.decode_worker
        harness.link.worker_lost(dead, "killed")
        again = await sent(workers, request)
        assert again.decode_worker != dead
        assert again.request_id == "r1~1"
        assert again.generation == replace(first.generation, prompt="")
        assert again.resume == Resume(
            tokens=(1, 2, 3, 10, 90, 91, 11, 12),  # the probe's tokens went in before the last token of then
            prompt_tokens=3,
            generated=(10, 11, 12),
            seen_passages=tuple(passage.id for passage in PASSAGES),
            first_token_ns=harness.clock(),
            last_probe_at=2,
        )
        await prefill.send(Tokens("r1", "c again", (12,)))  # the dead one, late
        await workers[again.decode_worker].send(Tokens("r1~1", "d", (13,), "length", 3))
        assert await request.next() == Tokens("r1~1", "d", (13,), "length", 3)
        assert (harness.codes, harness.ended[0].completion_tokens) == (["length"], 4)
        assert harness.router.in_flight == 0


async def test_a_failed_hand_over_is_retried_with_another_decode_worker() -> None:
    async with running_link(restarts=3) as harness:
        workers = await cast(harness)
        request = harness.submit()
        first = await sent(workers, request)
        await workers[request.placement.prefill].send(Failed("r1", "worker_lost", "decode did not take it"))
        assert await workers[first.decode_worker].receive() == Cancel("r1")
        again = await sent(workers, request)
        assert again.decode_worker != first.decode_worker


async def test_a_request_that_waits_too_long_fails_with_the_original_reason() -> None:
    async with running_link(restarts=3) as harness:
        await harness.worker("prefill", "p0")
        await harness.worker("decode", "d0")
        request = harness.submit(timeout_s=600)
        harness.link.worker_lost("d0", "killed")
        harness.clock.advance(RESTART_WAIT_S)
        harness.link.tick()
        error = await error_of(request)
        assert isinstance(error, WorkerLost)
        assert error.message.startswith("decode worker 'd0' was lost: killed, and no other worker accepted it: no ")
        assert harness.codes == ["worker_lost"]


async def test_while_the_node_stops_a_request_is_restarted_on_a_worker_that_is_left_and_waits_for_none() -> None:
    async with running_link(restarts=3) as harness:
        workers = await cast(harness)
        request = harness.submit(timeout_s=600)
        first = await sent(workers, request)
        harness.link.expect_no_worker()
        harness.link.worker_lost(first.decode_worker, "killed")
        left = (await sent(workers, request)).decode_worker
        assert left != first.decode_worker
        harness.link.worker_lost(left, "killed")
        error = await error_of(request)
        assert isinstance(error, WorkerLost)
        assert (
            error.message == f"decode worker '{left}' was lost: killed, and no other worker accepted it: no decode "
            "worker is ready; try again later"
        )
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            harness.submit("r2")
        assert (harness.codes, harness.router.in_flight) == (["worker_lost"], 0)


async def test_restarts_are_bounded() -> None:
    async with running_link(restarts=2) as harness:
        workers = await cast(harness)
        request = harness.submit()
        for _ in range(2):
            await workers[request.placement.prefill].send(Failed(request.attempt_id, "worker_lost", "again"))
            await workers[request.placement.prefill].settle()
        assert not request.ended
        await workers[request.placement.prefill].send(Failed(request.attempt_id, "worker_lost", "again"))
        error = await error_of(request)
        assert isinstance(error, WorkerLost)
        assert error.message == "again; the limit of 2 restarts is reached"


async def test_a_new_request_waits_for_the_first_worker_of_a_role_that_has_none() -> None:
    async with running_link(restarts=3) as harness:
        decode = await harness.worker("decode", "d0")
        request, cancelled = harness.submit(), harness.submit("r2")
        assert (harness.codes, harness.router.in_flight) == ([], 0)
        harness.link.cancel(cancelled)
        prefill = await harness.worker("prefill", "p0")
        harness.link.tick()
        told = await prefill.receive_prefill()
        assert (told.request_id, told.decode_worker) == ("r1", "d0")
        assert harness.link.restarts == 0
        await decode.send(Tokens("r1", "a", (10,), "stop", 3, prompt_token_ids=(1,)))
        await request.next()
        assert harness.codes == ["client_closed_request", "stop"]


async def test_the_prompt_of_a_request_that_waits_for_a_worker_is_hashed_once() -> None:
    async with running_link(restarts=3) as harness:
        request = harness.submit(prompt="hello " * 100)
        prefix = request.prefix
        assert prefix.blocks
        for _ in range(3):
            harness.link.tick()
        assert request.prefix is prefix


async def test_a_new_request_fails_in_time_if_no_worker_connects() -> None:
    async with running_link(restarts=3, max_in_flight=2) as harness:
        prefill = await harness.worker("prefill", "p0")
        waiting, late = harness.submit(), harness.submit("r2", timeout_s=RESTART_WAIT_S / 2)
        with pytest.raises(Overloaded, match="no decode worker is ready; try again later; 2 requests"):
            harness.submit("r3")
        harness.clock.advance(RESTART_WAIT_S / 2 + 1)
        await prefill.report(77)
        await prefill.settle()
        harness.link.tick()
        assert isinstance(await error_of(late), DeadlineExceeded | Unavailable)
        long = harness.submit("r4", prompt=tuple(range(20)))  # too long, as will turn out
        harness.clock.advance(RESTART_WAIT_S / 2)
        await prefill.report(77)
        await prefill.settle()
        harness.link.tick()
        error = await error_of(waiting)
        assert (type(error), error.message) == (Unavailable, "no decode worker is ready; try again later")
        await harness.worker("decode", "d0", limit=20)
        harness.link.tick()
        assert isinstance(await error_of(long), ContextLengthExceeded)
