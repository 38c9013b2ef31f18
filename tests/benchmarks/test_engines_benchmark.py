"""Tests of `benchmarks.engines` over a fake server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.engines import overhead
from benchmarks.engines.overhead import Delay
from benchmarks.engines.targets import Address, Answer, Targets
from tests.engines.fake_openai import MODEL, Behaviour, FakeServer
from tests.engines.fake_vllm import HttpFront
from tests.frontend.fake_workers import run


@asynccontextmanager
async def targets(home: Path, *names: str) -> AsyncIterator[tuple[Targets, FakeServer]]:
    """Return targets that all use one fake server."""
    fake, socket = FakeServer(Behaviour(model=MODEL)), str(home / "fake.sock")
    addresses = {name: Address("http://fake/v1", socket) for name in names}
    server = await asyncio.start_unix_server(HttpFront(fake).connected, socket)
    async with server, Targets(addresses, MODEL, 1, salted=True) as made:
        yield made, fake


def test_only_the_requested_parts_are_measured_and_each_has_its_bar(tmp_path: Path) -> None:
    async def test() -> None:
        async with targets(tmp_path, "direct", "through") as (made, _):
            only = ("ttft", "token", "same")
            found = await overhead.measure(made, None, only=only, pairs=6, rounds=1, tokens=4)
        assert found["same"] == 10
        assert len(found["ttft_added_ms"]) == 6
        assert "throughput_ratio" not in found
        report = "\n".join(overhead.report(found))
        assert "TTFT added without retrieval, ms" in report
        assert "throughput" not in report

    run(test())


def test_the_parts_of_a_delay_add_up_to_it() -> None:
    timings = {"embed": 0.009, "retrieval": 0.001, "admission": 0.0002, "prefill": 0.4, "ttft": 0.4103}
    through, direct = Answer(0.412, 0, 2, "", timings), Answer(0.399, 0, 2, "", {})
    delay = Delay.of(through, direct)
    assert sum(delay.parts.values()) == pytest.approx(through.ttft_s - direct.ttft_s, abs=2e-4)
    assert delay.rest == pytest.approx(0.413 - 0.4 - 0.01, abs=1e-3)
