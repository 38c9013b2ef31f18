"""The control loop's hands: reads the workers' tables, asks the law, turns the pools' knobs."""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runtime.node.config import NodeConfig
from runtime.node.control.law import ControlLaw, Readings, SignalMeter
from runtime.node.figures import ControlMetrics
from runtime.node.metrics.columns import Counter, DecodeMetrics, PoolMetrics
from runtime.node.metrics.table import WorkerTable

if TYPE_CHECKING:
    from runtime.node.figures import Family

log = logging.getLogger("control")

_WAIT = PoolMetrics.WAIT["prefill"]
_COUNTERS = (DecodeMetrics.LINK_BUSY_SECONDS, DecodeMetrics.ROW_SECONDS, DecodeMetrics.STALL_SECONDS)


class ControlLoop:
    """One node's. `step` is called as often as its caller likes and acts once in `interval_s`."""

    def __init__(self, config: NodeConfig, tables: Mapping[str, WorkerTable]) -> None:
        settings = self._settings = config.control
        self._reserve = config.pool.reserve
        self._pools = [table for table in tables.values() if table.role == "pool"]
        self._decodes = [table for table in tables.values() if table.role == "decode"]
        self._meter = SignalMeter(len(self._decodes), settings.interval_s)
        self.law = ControlLaw(config)
        self._left = dict.fromkeys(_COUNTERS, 0.0)  # what workers had counted that have left the node
        self._left_waits = [0.0] * (len(_WAIT.buckets) + 1)
        self._due_s = 0.0
        for table in self._pools:
            self._tell(table)

    def _tell(self, table: WorkerTable) -> None:
        """A pool that has not heard yet what is wanted."""
        if self._settings.enabled:
            table.set_knob("reserve", self.law.reserve)
            table.set_knob("flush_prefill_s", self.law.flush_prefill_s)

    def joined(self, table: WorkerTable) -> None:
        """A worker has come to the node."""
        if table.role == "decode":
            self._decodes.append(table)
            self._meter.links = len(self._decodes)
        elif table.role == "pool":
            self._pools.append(table)
            self._tell(table)

    def left(self, table: WorkerTable) -> None:
        """A worker has gone: what it has counted stays counted."""
        if table in self._decodes:
            for counter in _COUNTERS:
                self._left[counter] += table.value(counter)
            self._decodes.remove(table)
            self._meter.links = len(self._decodes)
        elif table in self._pools:
            self._pools.remove(table)
            counts = table.read(_WAIT)[:-1]
            self._left_waits = [sum(pair) for pair in zip(self._left_waits, counts, strict=True)]

    def step(self, now_s: float) -> None:
        """Look at the node, and move a knob of all pools if the law says so; each change is logged with its cause."""
        if not self._settings.enabled or now_s < self._due_s:
            return
        self._due_s = now_s + self._settings.interval_s
        for change in self.law.update(now_s, self._meter.update(now_s, self.readings())):
            log.info("%s %.4g → %.4g: %s", change.knob, change.before, change.after, change.cause)
            for table in self._pools:
                table.set_knob(change.knob, change.after)

    def families(self) -> "Iterator[Family]":
        """What the loop wants now, and how often it has changed its mind, for Prometheus."""
        yield ControlMetrics.RESERVE.now(self.law.reserve if self._settings.enabled else self._reserve)
        yield ControlMetrics.FLUSH_PREFILL.now(self.law.flush_prefill_s)
        yield ControlMetrics.CHANGES.now(self.law.changes)

    def readings(self) -> Readings:
        counts = [self._left_waits, *(table.read(_WAIT)[:-1] for table in self._pools)]
        return Readings(
            link_busy_s=self._sum(DecodeMetrics.LINK_BUSY_SECONDS),
            row_s=self._sum(DecodeMetrics.ROW_SECONDS),
            stall_s=self._sum(DecodeMetrics.STALL_SECONDS),
            wait_counts=[sum(bucket) for bucket in zip(*counts, strict=True)],
        )

    def _sum(self, counter: Counter) -> float:
        return self._left[counter] + sum(table.value(counter) for table in self._decodes)
