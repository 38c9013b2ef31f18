"""The control law: computes the pool's reserve r and prefill's flush timeout τ_pre from the node's signals. Pure code.

The supervisor and the simulator run this same class on their own clocks. The rules follow arXiv 2512.02281, by
priority:

- **Decode stalls**: its rows wait for probes for more than a third of the time that they can spend on it with tokens
  still within `slo.tpot_s`. r falls, down to a tenth. If they stall for all of that time, τ_pre is first raised
  to the longest wait that prefill may have, half of the TTFT target, since a prompt that is computed sooner would only
  wait among decode's rows. Prefill gets the remaining slots, and serves queries that can still meet their TTFT first.
- **Prefill waits too long**: the P95 wait of its queries for a slot exceeds its target. τ_pre is halved, and once it is
  0, r grows.
- **The KV link is used less than its target** while prefill queries wait: decode will soon be idle. The same changes
  follow. (An idle link while no prefill query waits for more than τ_pre says nothing about the pool: neither r nor
  τ_pre could fill it. Without a link whose use is known, this rule is left out.)
- **No query waits**: r returns step by step to its configured value, and τ_pre to its own, or to half of the target if
  that is less, so that it does not cause pressure on prefill by itself.

Stability: a pressure (signal ÷ target) within a band above 1 changes nothing (hysteresis). A direction must persist for
the dwell before each step, so that signals which alternate faster never act. A reversal halves the step, and only
steady movement in one direction lets it grow back, so that slower alternation is damped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from runtime.node.config import NodeConfig
from runtime.node.metrics.worker_metrics import PoolMetrics

Knob = Literal["reserve", "flush_prefill_s"]
_WAIT = PoolMetrics.WAIT["prefill"]

INTERVAL_S = 0.25  # between two updates; a metric's histogram is read for it, and a worker's knob is set at once
STEP = 0.1  # the largest change of r in an update
DWELL_S = 1.0  # for which the signals point in one direction before a change: signals are means over about a second
HYSTERESIS = 0.2  # share by which a signal must exceed its target
RESERVE_MIN = 0.1  # unless `pool.reserve` is less: prefill's queries keep a slot
RESERVE_MAX = 0.9  # decode keeps a slot
LINK_TARGET = 0.05  # use of the KV link below which decode may soon be idle
DECODE_STALL_TARGET = 0.25  # least target of the share of rows' time that probes take, where `slo.tpot_s` leaves less
_LEAST_WAIT_TARGET_S = 1e-3  # below a millisecond a P95 wait says little
_HALF_LIFE_S = 4 * INTERVAL_S  # of a signal
_LEAST_ROWS = 0.1  # rows on average, below which the last of them say nothing about decode now
_STRAINED = 0.3  # pressure from which decode's stalls have priority over prefill's waits
_TPOT_SHARE = 0.8  # share of a token's time beyond its step that stalls may take, as the mean of all rows
_MIN_STEP_SHARE = 1 / 8  # lower limit of the step after reversals, as a share of STEP
_IDLE = 0.1  # pressure below which no query waits noticeably


@dataclass(frozen=True, slots=True)
class Signals:
    """State of the node: KV-link use (None: not known) and stalled share of decode's row time in [0, 1], prefill's P95
    wait in s, and the time per token of a row without stalls (0: unknown)."""

    link_use: float | None
    prefill_wait_p95_s: float
    decode_stall: float
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a knob and its cause."""

    knob: Knob
    before: float
    after: float
    cause: str


def wait_target_s(config: NodeConfig) -> float:
    """Return the target of prefill's P95 wait for a pool slot: L_pre,max."""
    return max(config.slo.prefill_target_s, _LEAST_WAIT_TARGET_S)


class ControlLaw:
    """State of the law: `reserve` and `flush_prefill_s`. Each `update` changes at most one of them, by at most one
    step."""

    def __init__(self, config: NodeConfig) -> None:
        pool = config.pool
        self._wait_target_s = wait_target_s(config)
        self._longest_wait_s = max(self._wait_target_s, config.slo.prefill_wait_s)  # limit of τ_pre
        self._tpot_s = config.slo.tpot_s
        self._reserve_min = min(pool.reserve, RESERVE_MIN)
        self.reserve = self._reserve_configured = min(pool.reserve, RESERVE_MAX)
        self.flush_prefill_s = 0.0
        self.changes = 0
        self._step = STEP
        self._last_direction = 0  # direction of r's last change
        self._directions_held = 0, 0
        self._since_s = float("inf")  # since when `_directions_held` has held without a step

    def update(self, now_s: float, signals: Signals) -> Change | None:
        """Process the signals of the time until `now_s`, which never decreases; returns the change, if there is one."""
        directions = self._directions(signals)
        if directions != self._directions_held or self._since_s > now_s:
            self._directions_held, self._since_s = directions, now_s
        if now_s - self._since_s < DWELL_S:
            return None
        cause = self._cause(signals)
        change = self._move(*directions, cause) if any(directions) else self._relax(signals, cause)
        if change is not None:
            self._since_s = now_s
            self.changes += 1
        return change

    def pressures(self, signals: Signals) -> tuple[float, float]:
        """Return prefill's wait and decode's stall, each divided by its target."""
        target = DECODE_STALL_TARGET
        if signals.step_s > 0:
            target = max(target, _TPOT_SHARE * (1 - signals.step_s / self._tpot_s))
        return signals.prefill_wait_p95_s / self._wait_target_s, signals.decode_stall / target

    def _directions(self, signals: Signals) -> tuple[int, int]:
        """Return the directions of τ_pre and r: 1 up, -1 down, 0 unchanged."""
        prefill, decode = self.pressures(signals)
        band = 1 + HYSTERESIS
        waits = prefill > band
        if decode > _STRAINED:
            return (1 if decode > band else -waits), -1
        if decode > _STRAINED / band:
            return -waits, 0
        starved = signals.link_use is not None and signals.link_use < LINK_TARGET * (1 - HYSTERESIS)
        return (-1, 1) if waits or (starved and self._prefill_waits(signals)) else (0, 0)

    def _prefill_waits(self, signals: Signals) -> bool:
        """Whether prefill's queries wait for longer than the batching delay τ_pre."""
        return signals.prefill_wait_p95_s > _IDLE * self._wait_target_s + self.flush_prefill_s

    def _move(self, flush_direction: int, direction: int, cause: str) -> Change | None:
        flush = {1: self._longest_wait_s, 0: self.flush_prefill_s, -1: self.flush_prefill_s / 2}[flush_direction]
        if (change := self._set_flush(flush, cause)) is not None:
            return change
        step = self._step * (0.5 if direction == -self._last_direction else 1.5)
        self._step = min(max(step, STEP * _MIN_STEP_SHARE), STEP)
        if (change := self._set_reserve(self.reserve + direction * self._step, cause)) is not None:
            self._last_direction = direction
        return change

    def _relax(self, signals: Signals, cause: str) -> Change | None:
        """Without pressure and waiting queries, return towards the configured r and a τ_pre of 0."""
        _, decode = self.pressures(signals)
        if decode > _IDLE or self._prefill_waits(signals):
            return None
        towards = min(max(self._reserve_configured - self.reserve, -STEP), STEP)
        if (change := self._set_reserve(self.reserve + towards, cause)) is not None:
            return change
        return self._set_flush(self.flush_prefill_s / 2, cause)

    def _set_reserve(self, value: float, cause: str) -> Change | None:
        # rounded: else sums of steps differ by a last bit
        return self._set("reserve", round(min(max(value, self._reserve_min), RESERVE_MAX), 9), cause)

    def _set_flush(self, value: float, cause: str) -> Change | None:
        return self._set("flush_prefill_s", 0.0 if value < self._longest_wait_s / 32 else value, cause)

    def _set(self, knob: Knob, after: float, cause: str) -> Change | None:
        before = getattr(self, knob)
        setattr(self, knob, after)
        return None if after == before else Change(knob, before, after, cause)

    def _cause(self, signals: Signals) -> str:
        prefill, decode = self.pressures(signals)
        link = "" if signals.link_use is None else f", KV link in use {signals.link_use:.1%}"
        return (
            f"prefill waits {signals.prefill_wait_p95_s * 1e3:.2f} ms at P95 (pressure {prefill:.2f}), decode stalls "
            f"{signals.decode_stall:.1%} of its time (pressure {decode:.2f}){link}"
        )


@dataclass(frozen=True, slots=True)
class Readings:
    """Counters of a node at one moment, which fall when a worker is removed, and `links`, the number of KV links whose
    use is known. `wait_counts`: waits of prefill queries by bucket, over all pools."""

    links: float
    link_busy_s: float
    row_s: float
    stall_s: float
    tokens: float
    wait_counts: Sequence[float]


class SignalMeter:
    """Converts readings to signals over about the last second: older values decay by half every four intervals."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None  # the clock, and the counters in the order of `Readings`
        self._recent = np.zeros(5 + len(_WAIT.buckets) + 1)  # how much they have grown, decaying

    def update(self, now_s: float, readings: Readings) -> Signals:
        """Return the signals of the time until `now_s`. The first call has no reference: all are 0."""
        counters = (readings.link_busy_s, readings.row_s, readings.stall_s, readings.tokens, *readings.wait_counts)
        now = np.array((now_s, *counters))
        last, self._last = now if self._last is None else self._last, now
        growth = np.maximum(now - last, 0.0)  # 0 after the removal of a worker, which says nothing about the others'
        self._recent = self._recent * 0.5 ** (float(growth[0]) / _HALF_LIFE_S) + growth
        elapsed_s, link_busy_s, row_s, stall_s, tokens, *waits = self._recent.tolist()
        return Signals(
            link_use=_share(link_busy_s, elapsed_s * readings.links) if readings.links else None,
            prefill_wait_p95_s=quantile(0.95, _WAIT.buckets, waits),
            decode_stall=_share(stall_s, max(row_s, _LEAST_ROWS * elapsed_s)),
            step_s=max(row_s - stall_s, 0.0) / tokens if tokens > 0 else 0.0,
        )


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0


def quantile(q: float, edges: Sequence[float], counts: Sequence[float]) -> float:
    """Return the q-quantile of a histogram, interpolated within its bucket; `counts` has one more bucket, up to +∞, for
    which the lower edge is returned.

    Returns 0 while the counts sum to less than a tenth of an observation.
    """
    total = sum(counts)
    if total < 0.1:
        return 0.0
    rest, lower = q * total, 0.0
    for edge, count in zip(edges, counts, strict=False):
        if count >= rest:
            return lower + (edge - lower) * rest / count
        rest, lower = rest - count, edge
    return lower
