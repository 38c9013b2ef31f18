"""The control loop: reads the workers' tables, runs the control law and the planner, sets the pools' knobs."""

import logging
from collections.abc import Iterator, Mapping
from typing import get_args

from runtime.node.config import NodeConfig, Role
from runtime.node.control.law import INTERVAL_S, ControlLaw, Readings, SignalMeter
from runtime.node.control.planner import Move, Planner, Work
from runtime.node.engine_config import ServedSection
from runtime.node.metrics.kinds import Counter, Gauge
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import (
    DecodeMetrics,
    FrontendMetrics,
    PoolMetrics,
    PrefillMetrics,
    Stage,
)
from runtime.node.supervisor_metrics import ControlMetrics, Family

log = logging.getLogger("control")

_WAIT = PoolMetrics.WAIT["prefill"]
_PAUSE_S = 600.0  # of the planner, after a move that could not be made


class ControlLoop:
    """Control loop of one node. `step` may be called at any rate and acts once per INTERVAL_S.

    Of another engine, the frontend's table has what the tables of prefill and decode workers have otherwise.
    """

    def __init__(self, config: NodeConfig, tables: Mapping[str, WorkerTable]) -> None:
        self._planner_mode = config.control.planner
        self._served = isinstance(config.model, ServedSection)
        self._tables: dict[Role, list[WorkerTable]] = {
            role: [table for table in tables.values() if table.role == role] for role in get_args(Role)
        }
        self._meter = SignalMeter()
        self.law = ControlLaw(config)
        self._planner = Planner(config.slo) if self._served else Planner.of(config, config.slo)
        self._paused_until_s = 0.0
        self._observed: Stage | None = None
        self._moves: dict[Stage, int] = dict.fromkeys(get_args(Stage), 0)
        self._due_s = 0.0
        for table in self._tables["pool"]:
            self._set_knobs(table)

    def _set_knobs(self, table: WorkerTable) -> None:
        """Send the current values to a pool worker."""
        table.set_knob("reserve", self.law.reserve)
        table.set_knob("flush_prefill_s", self.law.flush_prefill_s)

    def add_worker(self, table: WorkerTable) -> None:
        """Include a worker that was added to the node."""
        self._tables[table.role].append(table)
        if table.role == "pool":
            self._set_knobs(table)

    def remove_worker(self, table: WorkerTable) -> None:
        """Exclude a worker that was removed."""
        self._tables[table.role].remove(table)

    def step(self, now_s: float) -> None:
        """Update the law, and set the pools' knobs if it changed one; each change is logged with its cause."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        if change := self.law.update(now_s, self._meter.update(now_s, self.readings())):
            log.info("%s %.4g → %.4g: %s", change.knob, change.before, change.after, change.cause)
            for table in self._tables["pool"]:
                table.set_knob(change.knob, change.after)

    def plan(self, now_s: float) -> Move | None:
        """Run the planner, if it is on; every worker must be ready. Logs a new move, and returns it if it is to be
        carried out."""
        if self._planner_mode == "off" or now_s < self._paused_until_s:
            return None
        move = self._planner.update(now_s, self._work())
        acts = self._planner_mode == "act" and not self._served  # servers of other engines keep their role
        if move is None or (not acts and move.role == self._observed):
            return None
        self._observed = move.role
        self._moves[move.role] += 1
        log.info("a %s worker should change its role: %s", move.role, move.cause)
        return move if acts else None

    def pause_planner(self, now_s: float) -> None:
        """Make no move for a while, because one was refused or failed, as the next one would."""
        self._paused_until_s = now_s + _PAUSE_S

    def _work(self) -> Work:
        decode_prompt_tokens = self._now(PrefillMetrics.NEW_TOKENS["decode"])
        not_passed = decode_prompt_tokens + self._now(PrefillMetrics.PREFIX_HIT_TOKENS)
        passed = self._now(PrefillMetrics.PROMPT_TOKENS) - not_passed
        return Work(
            pass_s=self._now(PrefillMetrics.PASS_SECONDS),
            # Another engine's prompts are counted when they are computed, including their cached tokens at the end.
            passed_tokens=self._now(PrefillMetrics.NEW_TOKENS["prefill"]) if self._served else passed,
            arrived_tokens=sum(map(self._now, PrefillMetrics.NEW_TOKENS.values())),
            decode_prompt_tokens=decode_prompt_tokens,
            prompts=sum(map(self._now, PrefillMetrics.PROMPTS.values())),
            row_s=self._now(DecodeMetrics.ROW_SECONDS) - self._now(DecodeMetrics.STALL_SECONDS),
            tokens=self._now(DecodeMetrics.GENERATION_TOKENS),
            slo_requests=self._now(FrontendMetrics.SLO_REQUESTS["all"]),
            slo_violations=self._now(FrontendMetrics.SLO_VIOLATIONS["all"]),
            prefill_waiting=self._now(PrefillMetrics.WAITING) + self._now(FrontendMetrics.SERVERS_WAITING["prefill"]),
            decode_waiting=self._now(DecodeMetrics.WAITING) + self._now(FrontendMetrics.SERVERS_WAITING["decode"]),
            workers={
                role: len(self._tables[role]) + int(self._now(up)) for role, up in FrontendMetrics.SERVERS.items()
            },
        )

    def families(self) -> Iterator[Family]:
        """Yield the loop's values and counters for Prometheus."""
        yield ControlMetrics.RESERVE.now(self.law.reserve)
        yield ControlMetrics.FLUSH_PREFILL.now(self.law.flush_prefill_s)
        yield ControlMetrics.CHANGES.now(self.law.changes)
        yield ControlMetrics.ROLE_LOAD.of(self._planner.loads)
        yield ControlMetrics.MOVES.of(self._moves)

    def readings(self) -> Readings:
        counts = [[0.0] * (len(_WAIT.buckets) + 1), *(table.read(_WAIT)[:-1] for table in self._tables["pool"])]
        return Readings(
            links=len(self._tables["decode"]) + self._now(FrontendMetrics.KV_LINKS),
            link_busy_s=self._now(DecodeMetrics.LINK_BUSY_SECONDS),
            row_s=self._now(DecodeMetrics.ROW_SECONDS),
            stall_s=self._now(DecodeMetrics.STALL_SECONDS),
            tokens=self._now(DecodeMetrics.GENERATION_TOKENS),
            wait_counts=[sum(bucket) for bucket in zip(*counts, strict=True)],
        )

    def _now(self, metric: Counter | Gauge) -> float:
        """Return the sum over all workers that have the metric."""
        tables = (table for role in self._tables.values() for table in role)
        return sum(table.value(metric) for table in tables if metric in table)
