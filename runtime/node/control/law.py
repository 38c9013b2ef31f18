"""The control law: from how the node fares to the pool's reserve r and prefill's flush timeout τ_pre. Pure code.

The supervisor and the simulator run this same class on clocks of their own. Its rules are those of arXiv 2512.02281:

- **Decode stalls**: its rows spend more than a third of the time waiting for probes that they can for their tokens to
  come within `slo.tpot_s`. r falls, to `reserve_min`. Where they stall for all of that time, τ_pre is first set to what
  prefill may wait for, half of the promised TTFT, for a prompt that is computed sooner would only wait among decode's
  rows. This goes before all others: prefill has what is left, and its queries that can still make their TTFT first.
- **Prefill waits too long**: the P95 wait of its queries for a slot is over its target. τ_pre is halved, and once that
  is nothing r grows.
- **The KV link is used less than its target** while prefill queries wait: decode will soon have too little to do. The
  same is done, by this alone. (A link that idles while no prefill query waits for more than τ_pre says nothing about
  the pool: neither r nor τ_pre could fill it.)
- **Nobody waits**: r goes back, step by step, to its configured value; and τ_pre to its own, or to half of the target
  if that is less, so that it cannot press prefill by itself.

Against oscillation: a pressure (signal ÷ target) within a band over 1 changes nothing (hysteresis); a direction must
hold without a break for the dwell before each step, so signals that alternate faster never act; a reversal halves the
step, and only steady movement one way lets it grow back, so slower alternation is damped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.node.config import NodeConfig
from runtime.node.metrics.worker_metrics import PoolMetrics

Knob = Literal["reserve", "flush_prefill_s"]
_WAIT = PoolMetrics.WAIT["prefill"]

_STRAINED = 0.3  # pressure from which decode's stalls go before prefill's waits
_TPOT_SHARE = 0.8  # of what a token may take beyond its step: what stalls may take of it, in the mean of all rows
_MIN_STEP_SHARE = 1 / 8  # of the configured step: what reversals leave of it
_AT_EASE = 0.1  # pressure under which nobody waits to speak of
_MAY_WAIT = 0.5  # pressure under which prefill can afford a longer τ_pre


@dataclass(frozen=True, slots=True)
class Signals:
    """How the node fares: KV-link use and stalled share of decode's row time in [0, 1], prefill's P95 wait in s, and
    how long a token takes a row without stalls (0: not known).

    A node without decode workers of its own has no link to fill: it counts as used.
    """

    link_use: float
    prefill_wait_p95_s: float
    decode_stall: float
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A knob was moved, and why."""

    knob: Knob
    before: float
    after: float
    cause: str


class ControlLaw:
    """Holds `reserve` and `flush_prefill_s`; `update` moves them, at most one of them, by at most one step, a call."""

    def __init__(self, config: NodeConfig) -> None:
        settings, pool = config.control, config.pool
        self._settings = settings
        self._wait_target_s = settings.wait_target_s(pool, config.slo)
        self._longest_wait_s = self._wait_target_s  # while decode stalls too much
        if settings.prefill_wait_target_s == "auto":
            self._longest_wait_s = max(self._wait_target_s, config.slo.prefill_wait_s)
        self._tpot_s = config.slo.tpot_s
        self._reserve_min = settings.min_reserve(pool)
        self.reserve = self._reserve_at_rest = min(max(pool.reserve, self._reserve_min), settings.reserve_max)
        self.flush_prefill_s = self._flush_at_rest = pool.flush_prefill_s
        self.changes = 0
        self._step = settings.step
        self._last_way = 0  # of r's last move: 1 up, -1 down
        self._ways = 0, 0
        self._since_s = float("inf")  # since when the signals have pointed `_ways`, and no step was taken

    def update(self, now_s: float, signals: Signals) -> list[Change]:
        """Take the signals of the time until `now_s` (never earlier than the last call's); what was changed."""
        ways = self._directions(signals)
        if ways != self._ways or self._since_s > now_s:
            self._ways, self._since_s = ways, now_s
        if now_s - self._since_s < self._settings.dwell_s:
            return []
        cause = self._cause(signals)
        change = self._move(*ways, cause) if any(ways) else self._relax(signals, cause)
        if change is None:
            return []
        self._since_s = now_s
        self.changes += 1
        return [change]

    def pressures(self, signals: Signals) -> tuple[float, float]:
        """Prefill's wait and decode's stall, each over its target."""
        target = self._settings.decode_stall_target
        if signals.step_s > 0:
            target = max(target, _TPOT_SHARE * (1 - signals.step_s / self._tpot_s))
        return signals.prefill_wait_p95_s / self._wait_target_s, signals.decode_stall / target

    def _directions(self, signals: Signals) -> tuple[int, int]:
        """Which way to move τ_pre and r: 1 up, -1 down, 0 not at all."""
        settings = self._settings
        prefill, decode = self.pressures(signals)
        band = 1 + settings.hysteresis
        waits = prefill > band
        if decode > _STRAINED:
            return (1 if decode > band else -waits), -1
        if decode > _STRAINED / band:
            return -waits, 0
        starved = signals.link_use < settings.link_target * (1 - settings.hysteresis)
        return (-1, 1) if waits or (starved and self._prefill_waits(signals)) else (0, 0)

    def _prefill_waits(self, signals: Signals) -> bool:
        """Whether prefill's queries wait, beyond the batching delay that they are given on purpose."""
        return signals.prefill_wait_p95_s > _AT_EASE * self._wait_target_s + self.flush_prefill_s

    def _move(self, flush_way: int, way: int, cause: str) -> Change | None:
        most = max(self._flush_at_rest, self._longest_wait_s)
        flush = {1: most, 0: self.flush_prefill_s, -1: self.flush_prefill_s / 2}[flush_way]
        if (change := self._set_flush(flush, cause)) is not None:
            return change
        settings = self._settings
        step = self._step * (0.5 if way == -self._last_way else 1.5)
        self._step = min(max(step, settings.step * _MIN_STEP_SHARE), settings.step)
        if (change := self._set_reserve(self.reserve + way * self._step, cause)) is not None:
            self._last_way = way
        return change

    def _relax(self, signals: Signals, cause: str) -> Change | None:
        """Neither stage is pressed: back towards what was configured, where whoever pays for it is at ease."""
        prefill, decode = self.pressures(signals)
        if decode <= _AT_EASE and not self._prefill_waits(signals):
            step = self._settings.step
            towards = min(max(self._reserve_at_rest - self.reserve, -step), step)
            if (change := self._set_reserve(self.reserve + towards, cause)) is not None:
                return change
            if self.flush_prefill_s > self._flush_at_rest:
                return self._set_flush(max(self.flush_prefill_s / 2, self._flush_at_rest), cause)
        most = min(self._flush_at_rest, self._wait_target_s / 2)
        after = min(max(self.flush_prefill_s * 2, self._flush_step), most)
        if prefill <= _MAY_WAIT and after > self.flush_prefill_s:
            return self._set_flush(after, cause)
        return None

    def _set_reserve(self, value: float, cause: str) -> Change | None:
        after = min(max(value, self._reserve_min), self._settings.reserve_max)
        if after == self.reserve:
            return None
        change = Change("reserve", self.reserve, after, cause)
        self.reserve = after
        return change

    @property
    def _flush_step(self) -> float:
        """What τ_pre is shortened to before it is nothing."""
        return max(min(self._flush_at_rest, self._wait_target_s) / 8, self._longest_wait_s / 32)

    def _set_flush(self, value: float, cause: str) -> Change | None:
        after = 0.0 if value < self._flush_step else value  # what is left of a few halvings is nothing
        if after == self.flush_prefill_s:
            return None
        change = Change("flush_prefill_s", self.flush_prefill_s, after, cause)
        self.flush_prefill_s = after
        return change

    def _cause(self, signals: Signals) -> str:
        prefill, decode = self.pressures(signals)
        return (
            f"prefill waits {signals.prefill_wait_p95_s * 1e3:.2f} ms at P95 (pressure {prefill:.2f}), decode stalls "
            f"{signals.decode_stall:.1%} of its time (pressure {decode:.2f}), KV link in use {signals.link_use:.1%}"
        )


@dataclass(frozen=True, slots=True)
class Readings:
    """A node's counters at a moment; all only grow. `wait_counts`: waits of prefill queries by bucket, of all pools."""

    link_busy_s: float
    row_s: float
    stall_s: float
    tokens: float
    wait_counts: Sequence[float]


class SignalMeter:
    """Readings → signals, over about the last second: what is older fades by half with every four intervals."""

    def __init__(self, links: int, interval_s: float) -> None:
        self.links = links
        self._half_life_s = 4 * interval_s
        self._last: tuple[float, Readings] | None = None
        self._elapsed_s = self._link_busy_s = self._row_s = self._stall_s = self._tokens = 0.0
        self._waits = [0.0] * (len(_WAIT.buckets) + 1)

    def update(self, now_s: float, readings: Readings) -> Signals:
        """Signals of the time until `now_s`. The first call has nothing to compare with: all are 0."""
        last_s, last = self._last or (now_s, readings)
        self._last = now_s, readings
        passed = now_s - last_s
        keep = 0.5 ** (passed / self._half_life_s)
        self._elapsed_s = self._elapsed_s * keep + passed
        self._link_busy_s = self._link_busy_s * keep + readings.link_busy_s - last.link_busy_s
        self._row_s = self._row_s * keep + readings.row_s - last.row_s
        self._stall_s = self._stall_s * keep + readings.stall_s - last.stall_s
        self._tokens = self._tokens * keep + readings.tokens - last.tokens
        deltas = (new - old for new, old in zip(readings.wait_counts, last.wait_counts, strict=True))
        self._waits = [old * keep + delta for old, delta in zip(self._waits, deltas, strict=True)]
        return Signals(
            link_use=_share(self._link_busy_s, self._elapsed_s * self.links) if self.links else 1.0,
            prefill_wait_p95_s=quantile(0.95, _WAIT.buckets, self._waits),
            decode_stall=_share(self._stall_s, self._row_s),
            step_s=max(self._row_s - self._stall_s, 0.0) / self._tokens if self._tokens > 0 else 0.0,
        )


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0


def quantile(q: float, edges: Sequence[float], counts: Sequence[float]) -> float:
    """The q-quantile of a histogram, linear within its bucket; `counts` has one bucket more, to +∞ (its lower edge).

    0 while the counts sum to less than a tenth of an observation.
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
