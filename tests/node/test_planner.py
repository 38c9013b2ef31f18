"""The planner: role changes by load, applied or only logged by the node."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from runtime.node.config import ControlSection, NodeConfig, SloSection
from runtime.node.control.loop import ControlLoop
from runtime.node.control.planner import Move, Planner, Work
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, PrefillMetrics, Stage
from runtime.node.supervisor.admin import admin_request
from tests.node.conftest import StartTiny
from tests.node.tiny_node import serve

SLO = SloSection(ttft_s=2.0, tpot_s=0.03, objective=0.9)


class Node:
    """A node with constant load, sampled by its planner once a second."""

    def __init__(self, prefill: int = 4, decode: int = 4, chunk_tokens: int = 0) -> None:
        self.planner = Planner(SLO, chunk_tokens)
        self.workers: dict[Stage, int] = {"prefill": prefill, "decode": decode}
        self.now_s = 0.0
        self.work = Work(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, self.workers)

    def run(
        self,
        seconds: int,
        *,
        asked: float = 2.0,
        token_s: float = 0.015,
        waiting: int = 0,
        left: float = 0.0,
        missed: float = 0.0,
        unpulled: int = 0,
    ) -> list[Move]:
        """asked: what prompts that come would take, in prefill workers (10,000 tokens a second each); left: what of
        that is decode's; token_s: of an answer's tokens, a hundred rows a decode worker."""
        moves = []
        for _ in range(seconds):
            pass_s, rows, old = min(asked - left, self.workers["prefill"]), 100.0 * self.workers["decode"], self.work
            self.work = Work(
                old.pass_s + pass_s, old.passed_tokens + pass_s * 10_000, old.arrived_tokens + asked * 10_000,
                old.decode_prompt_tokens + left * 10_000, old.prompts + 10,
                old.row_s + rows, old.tokens + rows / token_s,
                old.slo_requests + 10, old.slo_violations + 10 * missed, waiting, unpulled, dict(self.workers),
            )  # fmt: skip
            self.now_s += 1.0
            if (move := self.planner.update(self.now_s, self.work)) is not None:
                moves.append(move)
        return moves


def roles(moves: list[Move]) -> set[str]:
    return {move.role for move in moves}


def test_overloaded_prefill_gets_a_worker_from_decode() -> None:
    moves = Node().run(60, asked=5.0, waiting=30)
    assert roles(moves) == {"decode"}
    assert "4 prefill workers have a load of 1." in moves[0].cause


def test_a_missed_slo_triggers_a_beneficial_move_even_if_no_role_is_busy() -> None:
    assert Node().run(60, asked=2.4, token_s=0.011) == []
    assert roles(Node().run(60, asked=2.4, token_s=0.011, missed=0.2)) == {"decode"}


def test_a_short_load_spike_moves_no_worker() -> None:
    node = Node()
    for _ in range(5):
        assert node.run(5, asked=3.5) == []
        assert node.run(15) == []


def test_a_gain_within_the_noise_of_the_load_moves_no_worker() -> None:
    random, node = Random(0), Node()
    for _ in range(100):
        assert node.run(5, asked=random.choice((0.6, 7.0)), token_s=0.0134) == []
    assert roles(Node().run(60, asked=3.8, token_s=0.0134)) == {"decode"}, "the same load on average, without noise"


def test_when_both_roles_are_overloaded_no_worker_moves() -> None:
    assert Node().run(60, asked=4.0, token_s=0.03, missed=1.0) == []


def test_a_role_with_rising_load_gives_up_no_worker() -> None:
    node = Node()
    node.run(31, asked=0.5, token_s=0.011)
    for token_s in (0.0115, 0.012, 0.013, 0.015, 0.018):
        assert node.run(5, asked=4.5, token_s=token_s) == []
    assert roles(node.run(60, asked=4.5, token_s=0.018)) == {"decode"}


def test_after_the_proposed_move_no_further_move_is_proposed() -> None:
    node = Node()
    assert roles(node.run(60, asked=3.8, token_s=0.0134)) == {"decode"}
    node.workers = {"prefill": 5, "decode": 3}
    assert node.run(120, asked=3.8, token_s=0.0151) == []


def test_if_a_chunk_exceeds_the_tpot_only_prefill_computes_prompts() -> None:
    busy: dict[str, Any] = {"asked": 3.5, "token_s": 0.0111, "left": 0.0}
    assert roles(Node(prefill=2, decode=6, chunk_tokens=250).run(60, **busy)) == {"decode"}


# ---- the supervisor's use of the planner


def restless(planner: Planner, now_s: float, work: Work) -> Move | None:
    """Always propose to move a decode worker."""
    return Move("decode", "it always moves")


@pytest.fixture
def tables() -> Iterator[dict[str, WorkerTable]]:
    made = {name: WorkerTable.create(name[:-2], name, SLO) for name in ("prefill-0", "decode-0", "decode-1")}  # type: ignore[arg-type]
    yield made
    for table in made.values():
        table.close()


@pytest.mark.parametrize("burst", [1, 2, 4, 8, 32])
def test_prompts_that_come_to_decode_all_at_once_do_not_look_like_load_for_ever(burst: int) -> None:
    node = Node(prefill=2, decode=1, chunk_tokens=256)
    node.run(60, asked=0.3, left=0.1, token_s=0.012)
    node.run(1, asked=0.3 + burst, left=0.1 + burst, token_s=0.012)
    assert node.run(600, asked=0.3, left=0.1, token_s=0.012) == []
    assert max(node.planner.loads.values()) < 0.8


class BusyPrefill:
    """A control loop whose prefill is overloaded."""

    def __init__(self, tables: dict[str, WorkerTable], mode: str) -> None:
        self.tables, self.now_s = tables, 0.0
        self.loop = ControlLoop(NodeConfig(control=ControlSection(planner=mode), slo=SLO), tables)  # type: ignore[arg-type]

    def run(self, seconds: int) -> list[Move]:
        moves = []
        for _ in range(seconds):
            self.tables["prefill-0"].add(PrefillMetrics.PASS_SECONDS, 1.0)
            self.tables["prefill-0"].add(PrefillMetrics.PROMPT_TOKENS, 10_000)
            self.tables["prefill-0"].add(PrefillMetrics.PROMPTS["prefill"], 10)
            self.tables["prefill-0"].add(PrefillMetrics.NEW_TOKENS["prefill"], 15_000)
            self.tables["prefill-0"].set(PrefillMetrics.WAITING, 20)
            self.tables["decode-0"].add(DecodeMetrics.ROW_SECONDS, 1.0)
            self.tables["decode-0"].add(DecodeMetrics.GENERATION_TOKENS, 100)
            if (move := self.loop.plan(self.now_s)) is not None:
                moves.append(move)
            self.now_s += 1.0
        return moves


def busy_prefill(tables: dict[str, WorkerTable], mode: str) -> list[Move]:
    """Return the decisions after a minute of overloaded prefill."""
    node = BusyPrefill(tables, mode)
    moves = node.run(60)
    counted = {family.name: family for family in node.loop.families()}["trinity_planner_moves"]
    assert {sample.labels["role"]: bool(sample.value) for sample in counted.samples} == {
        "prefill": False,
        "decode": mode != "off",
    }
    return moves


def test_a_planner_that_is_off_decides_nothing(
    tables: dict[str, WorkerTable], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "control"):
        assert busy_prefill(tables, "off") == []
    assert not caplog.messages


def test_after_a_move_that_could_not_be_made_there_is_none_for_ten_minutes(tables: dict[str, WorkerTable]) -> None:
    node = BusyPrefill(tables, "act")
    assert node.run(60)
    node.loop.pause_planner(node.now_s)
    assert node.run(600) == []
    assert node.run(60)


def test_tokens_whose_rows_took_no_measurable_time_are_no_division_by_zero() -> None:
    node = Node()
    assert node.planner.update(0.0, node.work) is None
    assert node.planner.update(5.0, replace(node.work, tokens=5, prompts=1)) is None


def test_a_recommendation_is_logged_once_with_its_cause(
    tables: dict[str, WorkerTable], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "control"):
        assert busy_prefill(tables, "observe") == []
    (line,) = caplog.messages
    assert line.startswith("a decode worker should change its role: 0% of requests violate an SLO; 1 prefill")


def serve_restless(*args: str) -> None:
    Planner.update = restless  # type: ignore[assignment]
    serve(*args)  # type: ignore[arg-type]


def test_the_supervisor_flips_one_worker_at_a_time_and_keeps_the_last_of_a_role(start_tiny: StartTiny) -> None:
    more = '[model]\nname = "/nowhere"\n[decode]\nworkers = 3\n[control]\nplanner = "act"\n'
    node = start_tiny(more=more, process=serve_restless)
    node.eventually(lambda status: "prefill-2" in {found.name for found in status.workers}, "two flips")
    node.eventually(lambda status: sum("decode" in found.name for found in status.workers) == 1, "the last one")
    log = node.log.read_text()
    assert log.index("decode-2 has left") < log.index("prefill-2 is added")
    assert b"trinity_planner_moves_total" in admin_request(node.info.control, "metrics")
    node.eventually(
        lambda status: "the planner's flip of a decode worker is refused" in node.log.read_text(), "a refusal"
    )
