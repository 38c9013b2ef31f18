"""The control loop and the planner in front of other engines: by the gateway's own waits and vLLM's metrics."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runtime.engines.openai.load import parse_load
from runtime.node.config import NodeConfig, SloSection
from runtime.node.control.loop import ControlLoop
from runtime.node.engine_config import OpenAiSection, Stage
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import FrontendMetrics, PoolMetrics
from runtime.retrieval.passages import Passage
from tests.engines.engine_harness import PROBES, EngineHarness, read_answer, run_checks, running_engine, until
from tests.engines.fake_openai import MODEL, Behaviour, metrics

CONFIG = NodeConfig(model=OpenAiSection(name=MODEL, url="http://fake/v1"))
TARGET_S = SloSection().prefill_target_s
PREFILL_WAIT = PoolMetrics.WAIT["prefill"]


def page(link_s: float) -> str:
    return metrics(running=2, waiting=1, kv=0.25, link_s=link_s)


class Gateway:
    """An engine, a pool's table and the control loop, in virtual time."""

    def __init__(self, harness: EngineHarness, tables: dict[str, WorkerTable]) -> None:
        self.harness, self.tables, self.loop = harness, tables, ControlLoop(CONFIG, tables)

    async def run(self, seconds: float, wait_s: float | None = None, link_use: float | None = None) -> None:
        """Let time pass, with such waits of prefill's queries, and with transfers for this share of the time."""
        clock = self.harness.clock
        for _ in range(int(4 * seconds)):
            clock.advance(0.25)
            if wait_s is not None:
                self.tables["pool-0"].observe(PREFILL_WAIT, wait_s)
            if link_use is not None:
                self.harness.fakes[-1].behaviour.metrics = page(1.0 + link_use * clock() / 1e9)
            await run_checks(self.harness.engine.balancer)
            self.harness.engine.tick()
            self.loop.step(clock() / 1e9)

    @property
    def reserve(self) -> float:
        return self.tables["pool-0"].knob("reserve")

    @property
    def flush_prefill_s(self) -> float:
        return self.tables["pool-0"].knob("flush_prefill_s")


@pytest.fixture
def tables() -> Iterator[dict[str, WorkerTable]]:
    made = {
        "pool-0": WorkerTable.create("pool", "pool-0", SloSection()),
        "frontend-0": WorkerTable.create("frontend", "frontend-0", SloSection()),
    }
    yield made
    for table in made.values():
        table.close()


@asynccontextmanager
async def gateway(tables: dict[str, WorkerTable], *stages: Stage, **more: Any) -> AsyncIterator[Gateway]:
    roles = {"prefill": "kv_producer", "decode": "kv_consumer", "": ""}
    behaviours = [Behaviour(kv_role=roles[stage]) for stage in stages]
    table = tables["frontend-0"]
    async with running_engine(*behaviours, stages=stages, handover_tokens=1, table=table, **more) as harness:
        yield Gateway(harness, tables)


def test_the_transfers_of_vllms_connectors_are_its_kv_link() -> None:
    load = parse_load(page(0.75))
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage, load.link_busy_s) == (2, 1, 0.25, 0.75)
    mooncake = parse_load(page(0.5).replace("nixl_xfer", "mooncake_xfer"))
    assert mooncake is not None
    assert mooncake.link_busy_s == 0.5
    without = parse_load(page(0.5).partition("# HELP vllm:nixl")[0])
    assert without is not None
    assert without.link_busy_s == 0
    for number in ("inf", "nan", "x"):
        assert parse_load(page(0.5).replace(" 0.25", f" {number}")) is None, number


async def test_answers_that_wait_for_their_probes_lower_the_reserve(tables: dict[str, WorkerTable]) -> None:
    async with gateway(tables, "") as node:
        searches, found = 0, asyncio.Event()

        async def search(*_: object, **__: object) -> list[Passage]:
            nonlocal searches
            searches += 1
            if searches > 1:  # the first is prefill's
                await found.wait()
            return []

        before = node.reserve
        await node.run(5)
        assert (node.reserve, node.flush_prefill_s) == (before, 0)
        node.harness.library.search = search  # type: ignore[method-assign]
        answer = asyncio.create_task(read_answer(node.harness.complete("What?", PROBES, max_tokens=24)))
        await until(lambda: searches == 2)
        await node.run(5)
        found.set()
        assert len((await answer).ids) == 24
        assert node.flush_prefill_s == SloSection().prefill_wait_s
        assert node.reserve < before
        await node.run(30, wait_s=TARGET_S * 3)  # nothing stalls now, and prefill waits
        assert node.flush_prefill_s == 0
        assert node.reserve > before


async def test_without_a_link_metric_the_link_is_not_in_the_law(tables: dict[str, WorkerTable]) -> None:
    async with gateway(tables, "prefill", "decode") as node:
        before = node.reserve
        await node.run(10, wait_s=TARGET_S * 0.9)
        assert node.reserve == before


@pytest.mark.parametrize(("link_use", "raised"), [(0.0, True), (0.5, False)])
async def test_an_idle_link_of_vllm_raises_the_reserve_while_prefill_waits(
    tables: dict[str, WorkerTable], link_use: float, raised: bool
) -> None:
    async with gateway(tables, "prefill", "decode") as node:
        before = node.reserve
        await node.run(10, wait_s=TARGET_S * 0.9, link_use=link_use)
        assert (node.reserve > before) == raised
        busy_s = tables["frontend-0"].value(FrontendMetrics.LINK_BUSY_SECONDS)
        assert busy_s == pytest.approx(link_use * 10, abs=1.0)


async def test_servers_and_their_prompts_are_counted_by_role(tables: dict[str, WorkerTable]) -> None:
    async with gateway(tables, "prefill", "decode", "decode") as node:
        for topic in "abc":
            await read_answer(node.harness.chat(topic * 400, max_tokens=4))
        node.harness.fakes[0].behaviour.down = True
        await read_answer(node.harness.chat("d" * 400, max_tokens=4))
        node.harness.engine.tick()
        table = tables["frontend-0"]
        assert [table.value(FrontendMetrics.PROMPTS[role]) for role in ("prefill", "decode")] == [3, 1]
        assert [table.value(FrontendMetrics.SERVERS[role]) for role in ("prefill", "decode")] == [0, 2]
        assert table.value(FrontendMetrics.GENERATION_TOKENS) == 16


def test_the_planner_sees_the_servers_and_flips_none(
    tables: dict[str, WorkerTable], caplog: pytest.LogCaptureFixture
) -> None:
    loop, table = ControlLoop(CONFIG, tables), tables["frontend-0"]
    table.set(FrontendMetrics.SERVERS["prefill"], 1)
    table.set(FrontendMetrics.SERVERS["decode"], 2)
    table.set(FrontendMetrics.SERVERS_WAITING["prefill"], 20)
    with caplog.at_level("INFO", "control"):
        for second in range(60):
            table.add(FrontendMetrics.PASS_SECONDS, 1.5)
            table.add(FrontendMetrics.PROMPTS["prefill"], 10)
            table.add(FrontendMetrics.NEW_TOKENS["prefill"], 15_000)
            table.add(FrontendMetrics.PROMPT_TOKENS, 40_000)  # cached ones too
            table.add(FrontendMetrics.ROW_SECONDS, 1.0)
            table.add(FrontendMetrics.GENERATION_TOKENS, 100)
            assert loop.plan(float(second)) is None
    assert [message for message in caplog.messages if "a decode worker should change its role" in message]
    loads = {f.name: f for f in loop.families()}["trinity_planner_load_ratio"].samples
    assert {sample.labels["role"]: sample.value > 1 for sample in loads} == {"prefill": True, "decode": False}
