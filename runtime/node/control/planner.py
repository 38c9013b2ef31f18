"""The planner: from how much there is to do in each role to one worker that changes sides. Pure code.

The supervisor and the simulator run this same class. A role's load is what it does over what it can do within `[slo]`:

- **Prefill**: what the prompts that came would take there, those that decode computes too, over its workers' time.
- **Decode**: a step takes s = a / (1 - w / workers), where a is that of an empty batch and w the work of its rows, in
  workers. The load is w over what w may be for s to be `slo.tpot_s`; prompts that it computes do not count. (a: the
  least time of a token seen, a third of `tpot_s` at most.)
- Prompts that wait add their wait over `slo.ttft_s`, at most `_MOST_WAIT`: to decode's load if any wait for room there,
  more than a hand-over for each worker, else to prefill's.

With one worker more or less a load is that much less or greater. A worker moves if that lowers the greater of both
loads by `_GAIN`, while that load is over `_BUSY` or more requests miss what is promised than may; the same move must
have been due in two windows in a row. A role keeps one worker, and gives none while its load rises.
"""

from dataclasses import dataclass, replace
from typing import Any

from runtime.node.config import SloSection
from runtime.node.metrics.columns import Stage

_WINDOW_S = 5.0
_GAIN = 0.08
_BUSY = 0.7
_MOST_WAIT = 0.25
_RISES = 1.1
_COUNTERS = ("pass_s", "passed_tokens", "asked_tokens", "left_tokens", "prompts", "row_s", "tokens", "judged", "missed")


@dataclass(frozen=True, slots=True)
class Work:
    """A node now: counters since it began, then the requests that wait, and the workers that take some."""

    pass_s: float  # of all prefill workers
    passed_tokens: float  # of prompts, in these passes
    asked_tokens: float  # of all prompts that came
    left_tokens: float  # of those that prefill left to decode
    prompts: float
    row_s: float  # of all decode workers' rows, without their stalls
    tokens: float  # generated
    judged: float  # requests to which the promises apply
    missed: float  # of these, those that broke one
    prefill_waiting: float
    decode_waiting: float
    workers: dict[Stage, int]

    def since(self, before: "Work") -> "Work":
        """The same with what was counted since then."""
        passed: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in _COUNTERS}
        return replace(self, **passed)


@dataclass(frozen=True, slots=True)
class Move:
    """The role that is to give a worker to the other, and why."""

    role: Stage
    cause: str


class Planner:
    """`update` with the node's `Work` as often as one likes: it looks every five seconds, and says at most one move."""

    def __init__(self, slo: SloSection) -> None:
        self._slo = slo
        self._last: tuple[float, Work] | None = None
        self._token_s = 0.0  # of a prompt's token in a pass, lately
        self._least_s = slo.tpot_s / 3  # of a token of decode's
        self._due: Stage | None = None  # in the last window
        self.loads: dict[Stage, float] = {"prefill": 0.0, "decode": 0.0}

    def update(self, now_s: float, work: Work) -> Move | None:
        """Take the node as it is at `now_s`; who is to move now."""
        if self._last is None or now_s - self._last[0] < _WINDOW_S:
            self._last = self._last or (now_s, work)
            return None
        (then_s, before), self._last, last = self._last, (now_s, work), self.loads
        if min(work.workers.values()) < 1 or work.workers != before.workers:
            self._due = None  # a window with a move in it tells of two nodes
            return None
        delta = work.since(before)
        found = self._loads(now_s - then_s, delta)
        self.loads = {role: (last[role] + found[role]) / 2 for role in found}  # of the last windows, fading
        rises = {role for role in last if self.loads[role] > _RISES * last[role]}
        return self._decide(work.workers, delta, rises)

    def _loads(self, passed_s: float, delta: Work) -> dict[Stage, float]:
        if delta.passed_tokens > 0:
            self._token_s = delta.pass_s / delta.passed_tokens
        workers = delta.workers
        found: dict[Stage, float] = {
            "prefill": delta.asked_tokens * self._token_s / passed_s / workers["prefill"],
            "decode": 0.0,
        }
        if delta.tokens > 0:
            left = delta.left_tokens * self._token_s / passed_s / workers["decode"]
            token_s = delta.row_s / delta.tokens * max(1 - left, 0.1)
            self._least_s = min(self._least_s, token_s)
            found["decode"] = (1 - self._least_s / token_s) / (1 - self._least_s / self._slo.tpot_s)
        wait_s = (delta.prefill_waiting + delta.decode_waiting) * passed_s / max(delta.prompts, 1)
        full = delta.decode_waiting > workers["decode"]  # prefill's slots are held until decode has pulled their KV
        found["decode" if full else "prefill"] += min(wait_s / self._slo.ttft_s, _MOST_WAIT)
        return found

    def _decide(self, workers: dict[Stage, int], delta: Work, rises: set[Stage]) -> Move | None:
        after: dict[Stage, float] = {}
        others: tuple[tuple[Stage, Stage], ...] = (("prefill", "decode"), ("decode", "prefill"))
        for role, other in others:
            if workers[role] > 1 and role not in rises:
                less = self.loads[role] * workers[role] / (workers[role] - 1)
                after[role] = max(less, self.loads[other] * workers[other] / (workers[other] + 1))
        load, missed = max(self.loads.values()), delta.missed / max(delta.judged, 1)
        pressed = load > _BUSY or missed > 1 - self._slo.objective
        better = [role for role in after if after[role] <= load * (1 - _GAIN)]
        last, self._due = self._due, None
        if not better or not pressed:
            return None
        due = min(better, key=lambda role: after[role])
        if due != last:
            self._due = due
            return None
        loads = ", ".join(f"{workers[name]} {name} workers have a load of {self.loads[name]:.2f}" for name in workers)
        return Move(due, f"{missed:.0%} of requests miss what is promised; {loads}; then it is {after[due]:.2f}")
