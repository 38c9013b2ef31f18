"""Table of a worker in shared memory: its state, heartbeat and metrics, written by the worker, read by the supervisor.

The supervisor creates one table per worker and keeps it across restarts, so that counters never fall when a process
dies. There is one writer, with plain stores and no lock: a reader may see a histogram's sum one observation ahead of
its count, and an empty or truncated note while it is being written. Knobs are written by the supervisor and read by the
worker in every iteration of its loop. They are kept across restarts, too.

```
words 0..7   magic, layout version, state, heartbeat (monotonic ns), epoch, pid, words in all, 0    (uint64)
words 8..    one float64 per counter or gauge; per histogram its buckets, then its sum        (in the order of metrics)
then         one float64 per knob, NaN until it has a value                                   (in the order of KNOBS)
then         the worker's note, 1,024 bytes of UTF-8, terminated by a 0
```
"""

import bisect
import itertools
import math
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import numpy as np

from ipc import MemoryReference, SharedMemory
from runtime.node.config import Role, SloSection
from runtime.node.metrics.kinds import Counter, Gauge, Histogram, Metric
from runtime.node.metrics.worker_metrics import METRICS

_MAGIC = 0x545249_4E495459  # "TRINITY"
_VERSION = 4
_HEADER_WORDS = 8
_NOTE_BYTES = 1024

Knob = Literal[
    "reserve",  # share of the slots that is reserved for prefill queries, 0 to 1
    "flush_prefill_s",  # how long a prefill query leaves free slots to decode queries
    "reload_of",  # index of the collection to reload in the configuration, or -1 for all
    "reload",  # number of the requested reload
    "draining",  # 1 while the node drains on request of an operator, `NODE_STOPS` once it stops
]
NODE_STOPS = 2.0
_RELOADS: tuple[Knob, ...] = ("reload_of", "reload")
KNOBS: dict[Role, tuple[Knob, ...]] = {
    "pool": ("reserve", "flush_prefill_s", *_RELOADS),
    "prefill": _RELOADS,
    "decode": _RELOADS,
    "engine": (),
    "frontend": (*_RELOADS, "draining"),
    "http": (*_RELOADS, "draining"),
}
"""Values that the supervisor sets in a worker at run time, through its table."""


class State(IntEnum):
    """State that a worker reports. CLOSED: one that drains, and accepts no connections any more."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    CLOSED = 3


class WorkerTable:
    """Table of one worker. The supervisor creates it, the worker opens it by reference, both with the same SLOs."""

    def __init__(self, memory: SharedMemory, role: Role, slo: SloSection) -> None:
        self._memory = memory
        self._header = memory.view[: _HEADER_WORDS * 8].cast("Q")
        self._note = memory.view[-_NOTE_BYTES:]
        self._values = memory.view[_HEADER_WORDS * 8 : -_NOTE_BYTES].cast("d")
        self._array = np.frombuffer(memory.view[:-_NOTE_BYTES], np.float64, offset=_HEADER_WORDS * 8)
        self._totals: dict[Counter, float] = {}
        self.metrics = METRICS[role]
        self._edges = {metric: metric.edges(slo) for metric in self.metrics if isinstance(metric, Histogram)}
        *offsets, end = itertools.accumulate(_words_of(role, slo), initial=0)
        self._offsets = dict(zip(self.metrics, offsets, strict=True))
        self._knobs = {name: end + number for number, name in enumerate(KNOBS[role])}
        self.role = role

    @classmethod
    def create(cls, role: Role, name: str, slo: SloSection) -> "WorkerTable":
        words = _words(role, slo)
        table = cls(SharedMemory.create(f"trinity-table-{name}", words * 8), role, slo)
        table._header[0], table._header[1], table._header[6] = _MAGIC, _VERSION, words
        for knob in table._knobs:
            table.set_knob(knob, math.nan)
        table.beat()  # the first heartbeat, until a worker takes the table over
        return table

    @classmethod
    def open(cls, reference: MemoryReference, role: Role, slo: SloSection) -> "WorkerTable":
        """Open a table. Raises `ValueError` if the memory is not a table with these metrics."""
        table = cls(SharedMemory.open(reference, max_size=1 << 20, writable=True), role, slo)
        if (table._header[0], table._header[1]) != (_MAGIC, _VERSION):
            raise ValueError(f"worker table of {role}: not a table of layout {_VERSION}")
        if table._header[6] != (words := _words(role, slo)):
            raise ValueError(f"worker table of {role}: {table._header[6]} words, its metrics need {words}")
        return table

    @property
    def reference(self) -> MemoryReference:
        """Reference for the worker's process."""
        return self._memory.reference

    # ---- written by the worker

    def begin(self, epoch: int, pid: int) -> None:
        """Take the table over for a new process: gauges are reset to 0, counters continue."""
        for metric in self.metrics:
            if isinstance(metric, Gauge):
                self.set(metric, 0.0)
        self._totals.clear()
        self.state = State.STARTING  # before the epoch: otherwise a reader could see the new epoch with the old state
        self.note = ""
        self._header[4], self._header[5] = epoch, pid
        self.beat()

    def beat(self) -> None:
        """Write a heartbeat; called by the worker's loop itself, so that the heartbeat of a hung loop grows old."""
        self._header[3] = time.monotonic_ns()

    def address(self, metric: Counter | Histogram) -> int:
        """Return the address of a counter's value (float64) or of a histogram's first bucket, for compiled code."""
        return self._memory.address + 8 * (_HEADER_WORDS + self._offsets[metric])

    def edges(self, histogram: Histogram) -> tuple[float, ...]:
        """Return the upper edges of its buckets, without the last one's."""
        return self._edges[histogram]

    def __contains__(self, metric: Metric) -> bool:
        return metric in self._offsets

    def add(self, counter: Counter, amount: float = 1.0) -> None:
        self._values[self._offsets[counter]] += amount

    def total(self, counter: Counter, total: float) -> None:
        """Set a counter that the worker counts from 0 in every process: the table's counter grows by the difference."""
        self.add(counter, total - self._totals.get(counter, 0.0))
        self._totals[counter] = total

    def set(self, gauge: Gauge, value: float) -> None:
        self._values[self._offsets[gauge]] = value

    def observe(self, histogram: Histogram, value: float) -> None:
        offset, edges = self._offsets[histogram], self._edges[histogram]
        self._values[offset + bisect.bisect_left(edges, value)] += 1
        self._values[offset + len(edges) + 1] += value

    def observe_many(self, histogram: Histogram, values: Sequence[float]) -> None:
        """Record all observations of a step at once."""
        offset, edges = self._offsets[histogram], self._edges[histogram]
        buckets = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1)
        self._array[offset : offset + len(edges) + 1] += buckets
        self._array[offset + len(edges) + 1] += sum(values)

    def knob(self, name: Knob) -> float:
        """Return a knob's value; NaN until a worker has started with the configured value."""
        return self._values[self._knobs[name]]

    def begin_knob(self, name: Knob, configured: float) -> None:
        """Give a knob without a value the configured one, when a worker starts; others keep the value that was set."""
        if math.isnan(self.knob(name)):
            self.set_knob(name, configured)

    @property
    def note(self) -> str:
        """One line for the operator: why the worker could not run, or which collection it does not serve."""
        return bytes(self._note).partition(b"\0")[0].decode(errors="ignore")

    @note.setter
    def note(self, text: str) -> None:
        """Set the line that `trinity status` shows, truncated to the space there is; "" clears it."""
        line = " ".join(text.split()).encode()[: _NOTE_BYTES - 1] + b"\0"
        self._note[0] = 0
        self._note[1 : len(line)] = line[1:]
        self._note[0] = line[0]

    @property
    def state(self) -> State:
        return State(self._header[2])

    @state.setter
    def state(self, state: State) -> None:
        self._header[2] = state

    # ---- written by the supervisor

    def set_knob(self, name: Knob, value: float) -> None:
        """Set a knob. The worker applies it in the next iteration of its loop, within its bounds."""
        self._values[self._knobs[name]] = value

    # ---- read by the supervisor

    @property
    def epoch(self) -> int:
        return int(self._header[4])

    def age_s(self, now_ns: int) -> float:
        """Return the seconds since the worker's last heartbeat; 0 for one that was written after `now_ns` was read."""
        return max(0, now_ns - int(self._header[3])) / 1e9

    def read(self, metric: Metric) -> list[float]:
        """Return the value of a counter or gauge, or the bucket counts (not cumulative) and the sum of a histogram."""
        offset = self._offsets[metric]
        words = len(self._edges[metric]) + 2 if isinstance(metric, Histogram) else 1
        return list(self._values[offset : offset + words])

    def value(self, metric: Counter | Gauge) -> float:
        return self._values[self._offsets[metric]]

    def close(self) -> None:
        self._array = np.empty(0)  # releases its reference to the memory
        self._header.release()
        self._values.release()
        self._note.release()
        self._memory.close()


def _words_of(role: Role, slo: SloSection) -> list[int]:
    """Return the words of each metric: of a histogram its buckets, of which the last one has no edge, and the sum."""
    return [len(metric.edges(slo)) + 2 if isinstance(metric, Histogram) else 1 for metric in METRICS[role]]


def _words(role: Role, slo: SloSection) -> int:
    return _HEADER_WORDS + sum(_words_of(role, slo)) + len(KNOBS[role]) + _NOTE_BYTES // 8
