"""Worker losses, timeouts, drains and reconnects at the frontend's worker link."""

import asyncio

import pytest

from runtime.errors import WorkerLost
from runtime.serving.frontend import worker_link
from runtime.serving.messages import Cancel, Release, Retrieval, Taken, Tokens, Welcome
from tests.frontend.fake_workers import FakeWorker
from tests.frontend.link_harness import EPOCH, LOST_AFTER_S, LinkHarness, error_of, running_link


def names(harness: LinkHarness) -> list[str]:
    """Return the names of the workers that the frontend knows."""
    return sorted(worker.hello.worker for worker in harness.link.router.workers())


async def test_a_disconnected_worker_is_lost_before_the_heartbeat_timeout() -> None:
    async with running_link() as harness:
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        request = harness.submit()
        await prefill.receive_prefill()
        decode.close()
        harness.clock.advance(1.1)
        await prefill.settle()
        while not harness.codes:  # the socket learns of the end in a thread of its own
            harness.link.tick()
            await asyncio.sleep(0)
        assert harness.link.missing() == ["decode"]
        error = await error_of(request)
        assert isinstance(error, WorkerLost)
        assert error.message == "decode worker 'd0' was lost: its connection is gone"


async def test_a_silent_worker_is_lost_and_rejoins_with_its_next_report() -> None:
    async with running_link() as harness:
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        request = harness.submit()
        await prefill.receive_prefill()
        harness.clock.advance(LOST_AFTER_S)
        await prefill.settle()
        harness.link.tick()
        assert harness.link.missing() == []
        harness.clock.advance(0.1)
        harness.link.tick()
        assert harness.link.missing() == ["decode"]
        error = await error_of(request)
        assert isinstance(error, WorkerLost)
        assert error.message == "decode worker 'd0' was lost: silent for 10.1 s, the limit is 10.0 s"
        assert await prefill.receive() == Cancel("r1")
        assert await decode.receive() == Welcome(EPOCH)  # it was asked whether it is still there
        assert await decode.receive() == Cancel("r1")  # for when it wakes
        await decode.report(EPOCH)
        await decode.settle()
        assert harness.link.missing() == []
        harness.submit("r2")
        assert harness.codes == ["worker_lost"]


async def test_a_draining_worker_gets_no_requests_and_is_released_when_idle() -> None:
    async with running_link() as harness:
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        request = harness.submit()  # on its way to prefill: decode has not heard of it yet
        await prefill.receive_prefill()
        await decode.report(EPOCH, draining=True)
        await decode.report(0)
        assert await decode.receive() == Welcome(EPOCH)  # and no release before it
        other = await harness.worker("decode", "d1")
        assert harness.submit("r2").placement.decode == "d1"
        await decode.send(Tokens("r1", "a", (5,), "stop", 3, {}))
        assert await request.next() == Tokens("r1", "a", (5,), "stop", 3, {})
        await decode.report(EPOCH, draining=True)
        assert await decode.receive() == Release()
        await other.settle()


async def test_a_prompt_that_decode_has_taken_outlives_its_prefill_worker_which_may_drain() -> None:
    async with running_link() as harness:
        prefill, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        plain, searching = harness.submit("r1"), harness.submit("r2", retrieval=Retrieval("docs"))
        for _ in range(2):
            await prefill.receive_prefill()
        await decode.send(Taken("r1"))
        await decode.send(Taken("r2"))
        await decode.settle()
        await prefill.report(EPOCH, draining=True)
        assert await prefill.receive() == Release()
        harness.link.worker_lost("p0", "killed")
        assert isinstance(await error_of(searching), WorkerLost), "its passages have not arrived"
        await decode.send(Tokens("r1", "a", (5,), "stop", 1))
        assert await plain.next() == Tokens("r1", "a", (5,), "stop", 1)
        assert plain.first_token_ns == harness.clock()
        assert harness.codes == ["worker_lost", "stop"]


async def test_a_new_process_under_an_old_name_ends_the_old_requests_once() -> None:
    async with running_link() as harness:
        prefill, _ = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        request = harness.submit()
        await prefill.receive_prefill()
        again = await harness.worker("decode", "d0", epoch=2)
        error = await error_of(request)
        assert (type(error), error.message) == (WorkerLost, "decode worker 'd0' was lost: it was restarted")
        assert await prefill.receive() == Cancel("r1")
        harness.link.worker_lost("d0", "the supervisor says so too")
        await again.hello()
        assert harness.codes == ["worker_lost"]
        harness.submit("r2")
        assert (await prefill.receive_prefill()).request_id == "r2"


async def test_a_worker_of_the_previous_frontend_is_asked_to_register() -> None:
    async with running_link() as harness:
        worker = FakeWorker(harness.link.endpoint, "prefill", "p0")
        harness.workers.append(worker)
        await worker.report(EPOCH - 1)
        assert await worker.receive() == Welcome(EPOCH)
        await worker.send(Tokens("of the last frontend", "a", (1,)))
        assert await worker.receive() == Welcome(EPOCH)
        assert harness.link.missing() == ["prefill", "decode"]
        await worker.hello()
        await worker.hello()
        assert harness.link.missing() == ["decode"]


async def test_lost_workers_free_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "MAX_WORKERS", 2)
    async with running_link() as harness:
        await harness.worker("prefill", "p0")
        await harness.worker("prefill", "p1")
        third = FakeWorker(harness.link.endpoint, "prefill", "p2")
        harness.workers.append(third)
        await third.send(third.me)
        await third.settle()
        assert len(harness.link.router.workers()) == 2
        harness.link.worker_lost("p0", "killed")
        await third.hello()
        assert len(harness.link.router.workers()) == 2


async def test_sending_to_a_closed_connection_loses_the_worker_and_retries_the_request() -> None:
    async with running_link() as harness:
        first, decode = await harness.worker("prefill", "p0"), await harness.worker("decode", "d0")
        first.close()
        harness.workers.remove(first)
        second = await harness.worker("prefill", "p1")
        # Nothing tells the frontend of the closed connection until it sends; ZeroMQ notices soon after the close.
        for number in range(10_000):
            harness.submit(f"r{number}")
            if "p0" not in names(harness):
                break
            await decode.settle()
        assert names(harness) == ["d0", "p1"]
        assert (await second.receive_prefill()).request_id.startswith("r")
