"""The planner: from how much there is to do in each role to one worker that changes sides. Pure code.

The supervisor and the simulator run this same class. A role's load is what it does over what it can do within `[slo]`:

- **Prefill**: what the prompts that came would take there, over its workers' time, less what decode has time for.
- **Decode**: a step takes s = a / (1 - w / workers), where a is that of an empty batch and w the work of its rows, in
  workers. The load is w over what w may be for s to be `slo.tpot_s`. (a: the least time of a token seen, a third of
  `tpot_s` at most.)
- **Prompts that decode computes**, where it may: as many as make both loads equal, while a chunk beside a step keeps
  `tpot_s`. A chunk takes a step of its own, so decode has done c seconds of them in c (1 + a / chunk).
- Prompts that wait add their wait over `slo.ttft_s`, at most `_MOST_WAIT`: to decode's load if any wait for room there,
  more than a hand-over for each worker, else to prefill's.

What there is to do stays the same with one worker more or less. A worker moves if that lowers the greater of both loads
by `_GAIN` as if decode computed no prompts, and by `_LEAST_GAIN` as it does (at all, if more requests miss what is
promised than may), while that load is over `_BUSY` or so many miss; the same move must have been due in two windows in
a row. A role keeps one worker, and gives none while there is more and more for it to do.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from runtime.node.config import NodeConfig, SloSection
from runtime.node.metrics.worker_metrics import Stage

_WINDOW_S = 5.0
_GAIN, _LEAST_GAIN = 0.08, 0.05
_BUSY = 0.7
_MOST_WAIT = 0.25
_RISES = 1.1
_COUNTERS = (
    "pass_s",
    "passed_tokens",
    "arrived_tokens",
    "decode_prompt_tokens",
    "prompts",
    "row_s",
    "tokens",
    "slo_requests",
    "slo_violations",
)


@dataclass(frozen=True, slots=True)
class Work:
    """A node now: counters since it began, then the requests that wait, and the workers that take some."""

    pass_s: float  # of all prefill workers
    passed_tokens: float  # of prompts, in these passes
    arrived_tokens: float  # of all prompts that came
    decode_prompt_tokens: float  # of those that prefill left to decode
    prompts: float
    row_s: float  # of all decode workers' rows, without their stalls
    tokens: float  # generated
    slo_requests: float  # requests to which the promises apply
    slo_violations: float  # of these, those that broke one
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

    def __init__(self, slo: SloSection, chunk_tokens: int = 0) -> None:
        """chunk_tokens: of prompts that decode computes in a step, where it may do so; 0: it may not."""
        self._slo, self._chunk_tokens = slo, chunk_tokens
        self._last: tuple[float, Work] | None = None
        self._token_s = 0.0  # of a prompt's token in a pass, lately
        self._least_s = slo.tpot_s / 3  # of a token of decode's
        self._due: Stage | None = None  # in the last window
        self._todo: dict[Stage, float] = {"prefill": 0.0, "decode": 0.0}  # in workers, of the last windows, fading
        self.loads: dict[Stage, float] = {"prefill": 0.0, "decode": 0.0}

    @classmethod
    def of(cls, config: NodeConfig, slo: SloSection) -> "Planner":
        return cls(slo, config.decode.chunk_tokens if config.handover.disaggregate == "auto" else 0)

    def update(self, now_s: float, work: Work) -> Move | None:
        """Take the node as it is at `now_s`; who is to move now."""
        if self._last is None or now_s - self._last[0] < _WINDOW_S:
            self._last = self._last or (now_s, work)
            return None
        (then_s, before), self._last = self._last, (now_s, work)
        if min(work.workers.values()) < 1 or work.workers != before.workers:
            self._due = None  # a window with a move in it tells of two nodes
            return None
        delta = work.since(before)
        found = self._found(now_s - then_s, delta)
        last, self._todo = self._todo, {role: (self._todo[role] + found[role]) / 2 for role in found}
        self.loads = self._loads(work.workers)
        return self._decide(work.workers, delta, {role for role in last if self._todo[role] > _RISES * last[role]})

    def _found(self, passed_s: float, delta: Work) -> dict[Stage, float]:
        """What there was to do in a window, in workers: prompts, and rows."""
        if delta.passed_tokens > 0:
            self._token_s = delta.pass_s / delta.passed_tokens
        workers = delta.workers
        found: dict[Stage, float] = {"prefill": delta.arrived_tokens * self._token_s / passed_s, "decode": 0.0}
        if delta.tokens > 0:
            left = delta.decode_prompt_tokens * self._token_s / passed_s / workers["decode"]
            token_s = delta.row_s / delta.tokens * max(1 - left, 0.1)
            self._least_s = min(self._least_s, token_s)
            found["decode"] = (1 - self._least_s / token_s) * workers["decode"]
        wait_s = (delta.prefill_waiting + delta.decode_waiting) * passed_s / max(delta.prompts, 1)
        wait = min(wait_s / self._slo.ttft_s, _MOST_WAIT)
        if delta.decode_waiting > workers["decode"]:  # prefill's slots are held until decode has pulled their KV
            found["decode"] += wait * workers["decode"] * self._most_rows
        else:
            found["prefill"] += wait * workers["prefill"]
        return found

    @property
    def _most_rows(self) -> float:
        """What the rows' work of a decode worker may be."""
        return 1 - self._least_s / self._slo.tpot_s

    def _loads(self, workers: dict[Stage, int], *, apart: bool = False) -> dict[Stage, float]:
        """Both loads with so many workers; `apart`: if prefill computed all prompts."""
        prompts, rows = self._todo["prefill"], self._todo["decode"]
        prefill, decode = workers["prefill"], workers["decode"]
        chunk_s, can = 0.0 if apart else self._chunk_tokens * self._token_s, decode * self._most_rows
        left = cost = 0.0
        if chunk_s and rows < decode and self._least_s / (1 - rows / decode) + chunk_s <= self._slo.tpot_s:
            cost = 1 + self._least_s / chunk_s
            even = (prompts * can - rows * prefill) / (prefill + can)
            full = (prompts * decode - rows * prefill) / (cost * prefill + decode)
            left = max(min(even, full), 0.0)
        return {
            "prefill": (prompts - left) / prefill,
            "decode": max((rows + left) / can, (rows + cost * left) / decode),
        }

    def _decide(self, workers: dict[Stage, int], delta: Work, rises: set[Stage]) -> Move | None:
        after: dict[Stage, float] = {}
        apart, load = max(self._loads(workers, apart=True).values()), max(self.loads.values())
        others: tuple[tuple[Stage, Stage], ...] = (("prefill", "decode"), ("decode", "prefill"))
        for role, other in others:
            if workers[role] > 1 and role not in rises:
                then = {role: workers[role] - 1, other: workers[other] + 1}
                less = max(self._loads(then, apart=True).values()) <= apart * (1 - _GAIN)
                after[role] = max(self._loads(then).values()) if less else inf
        missed = delta.slo_violations / max(delta.slo_requests, 1)
        misses = missed > 1 - self._slo.objective
        pressed = apart > _BUSY or misses
        better = [role for role in after if after[role] <= load * (1.0 if misses else 1 - _LEAST_GAIN)]
        last, self._due = self._due, None
        if not better or not pressed:
            return None
        due = min(better, key=lambda role: after[role])
        if due != last:
            self._due = due
            return None
        loads = ", ".join(f"{workers[name]} {name} workers have a load of {self.loads[name]:.2f}" for name in workers)
        return Move(due, f"{missed:.0%} of requests miss what is promised; {loads}; then it is {after[due]:.2f}")
