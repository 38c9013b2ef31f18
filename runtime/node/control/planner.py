"""The planner: decides from the load of each role whether one worker changes its role. Pure code.

The supervisor and the simulator run this same class. A role's load is its work over its capacity within `[slo]`:

- **Prefill**: the time that the arrived prompts take there, over the time of its workers, less the prompts that decode
  has time for.
- **Decode**: a step takes s = a / (1 - w / workers), where a is the step of an empty batch and w the work of its rows,
  in workers. The load is w over the w at which s is `slo.tpot_s`. (a: the least time per token seen, at most a third of
  `tpot_s`. Windows in which decode is given many prompts do not count.)
- **Prompts that decode computes**, where it may: as many as equalize both loads, while a chunk beside a step keeps
  `tpot_s`. A chunk takes a step of its own, so that c seconds of them take decode c (1 + a / chunk).
- Waiting prompts add their wait over `slo.ttft_s`, at most `_MAX_WAIT`: to decode's load if more than one hand-over per
  worker waits for room there, else to prefill's.

The work does not depend on the number of workers. A worker moves if that lowers the higher of both loads by `_GAIN` as
if decode computed no prompts, and by `_MIN_GAIN` as it does (by any amount if the SLO violations exceed the error
budget), while that load is over `_BUSY` or the violations exceed the budget. A role keeps one worker, and gives none
away while its work grows.

Steady load must not move workers back and forth, however much prompts differ. So the averages cover about
`_AVERAGED_PROMPTS` prompts, and a move must gain `_ERRORS` standard errors of them more than `_GAIN`. It must be the
best one in `_CONFIRMED` windows more than not, and one that undoes the last move in `_MAX_BACK` windows right after it,
one less with every ten seconds that pass.
"""

from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from runtime.node.config import NodeConfig, SloSection
from runtime.node.metrics.worker_metrics import Stage

_WINDOW_S = 5.0
_GAIN, _MIN_GAIN = 0.08, 0.05
_ERRORS = 2.1
_BUSY = 0.8
_MAX_WAIT = 0.25
_GROWTH = 1.2
_MAX_PROMPTS = 0.5  # share of a window that prompts take decode, in which the least time per token is still measured
_AVERAGED_PROMPTS = 200
_MIN_WEIGHT, _MAX_WEIGHT = 0.05, 0.5  # of a window
_CONFIRMED, _MAX_BACK = 3, 40
_NO_COUNTERS = ("prefill_waiting", "decode_waiting", "workers")  # of `Work`


@dataclass(frozen=True, slots=True)
class Work:
    """State of a node: counters since its start, the numbers of waiting requests, and the workers."""

    pass_s: float  # of all prefill workers
    passed_tokens: float  # of prompts, in these forward passes
    arrived_tokens: float  # of all arrived prompts
    decode_prompt_tokens: float  # of those that decode computes
    prompts: float
    row_s: float  # of all decode rows, without stalls
    tokens: float  # generated
    slo_requests: float  # requests to which SLOs apply
    slo_violations: float  # of these, those that violated one
    prefill_waiting: float
    decode_waiting: float
    workers: dict[Stage, int]

    def since(self, before: "Work") -> "Work":
        """Return the same with counters relative to `before`."""
        names = [field.name for field in fields(self) if field.name not in _NO_COUNTERS]
        passed: dict[str, Any] = {name: max(getattr(self, name) - getattr(before, name), 0.0) for name in names}
        return replace(self, **passed)


@dataclass(frozen=True, slots=True)
class Move:
    """The role that gives a worker to the other one, and the cause."""

    role: Stage
    cause: str


class Planner:
    """Call `update` with the node's `Work` at any rate: it evaluates windows of five seconds and returns at most one
    move."""

    def __init__(self, slo: SloSection, chunk_tokens: int = 0) -> None:
        """chunk_tokens: size of the chunks in which decode computes prompts, 0 if it does not."""
        self._slo, self._chunk_tokens = slo, chunk_tokens
        self._last: tuple[float, Work] | None = None
        self._token_s = 0.0  # prefill time per token in the last window
        self._min_token_s = slo.tpot_s / 3  # least time per decode token
        # windows in which a role's move was best, less others
        self._evidence: dict[Stage, int] = {"prefill": 0, "decode": 0}
        self._last_move: Stage | None = None
        self._moved_s = 0.0
        # In workers: an exponential average over windows, its standard error, a window's variance, the last window.
        self._work: dict[Stage, float] = {"prefill": 0.0, "decode": 0.0}
        self._errors, self._variance = dict(self._work), dict(self._work)
        self._found: dict[Stage, float] = {}
        self._windows = 0
        self.loads: dict[Stage, float] = {"prefill": 0.0, "decode": 0.0}

    @classmethod
    def of(cls, config: NodeConfig, slo: SloSection) -> "Planner":
        return cls(slo, config.decode.chunk_tokens if config.handover.disaggregate == "auto" else 0)

    def update(self, now_s: float, work: Work) -> Move | None:
        """Process the node's state at `now_s` and return the move to make now, if there is one."""
        if self._last is None or now_s - self._last[0] < _WINDOW_S:
            self._last = self._last or (now_s, work)
            return None
        (then_s, before), self._last = self._last, (now_s, work)
        if min(work.workers.values()) < 1 or work.workers != before.workers:
            return None  # a window with a move in it mixes two configurations
        delta = work.since(before)
        demand = self._measure(now_s - then_s, delta)
        last = dict(self._work)
        self._average(demand, min(max(delta.prompts / _AVERAGED_PROMPTS, _MIN_WEIGHT), _MAX_WEIGHT))
        self.loads = self._loads(work.workers)
        growing = {role for role in last if demand[role] > _GROWTH * last[role]}
        return self._confirm(now_s, self._decide(work.workers, delta, growing))

    def _average(self, measured: dict[Stage, float], weight: float) -> None:
        """Add a window's work to the averages. Their standard errors follow from how much windows differ from the ones
        before, so that a slow change of the load is no error."""
        self._windows += 1
        for role, work in measured.items():
            self._work[role] += (work - self._work[role]) * weight
            variance = (work - self._found.get(role, work)) ** 2 / 2
            self._variance[role] += (variance - self._variance[role]) * max(_MIN_WEIGHT, 1 / self._windows)
            self._errors[role] = (weight / (2 - weight) * self._variance[role]) ** 0.5
        self._found = measured

    def _confirm(self, now_s: float, move: Move | None) -> Move | None:
        """Return this window's move once it has been the best one often enough."""
        for role in self._evidence:
            for_it = move is not None and move.role == role
            self._evidence[role] = max(self._evidence[role] + (1 if for_it else -1), 0)
        if move is None:
            return None
        needed = _CONFIRMED
        if self._last_move not in (None, move.role):
            needed = max(needed, _MAX_BACK - int((now_s - self._moved_s) / (2 * _WINDOW_S)))
        if self._evidence[move.role] < needed:
            return None
        self._evidence = dict.fromkeys(self._evidence, 0)
        self._last_move, self._moved_s = move.role, now_s
        return move

    def _measure(self, passed_s: float, delta: Work) -> dict[Stage, float]:
        """Return the work of a window, in workers: prompts, and rows."""
        if delta.passed_tokens > 0:
            self._token_s = delta.pass_s / delta.passed_tokens
        workers = delta.workers
        work: dict[Stage, float] = {"prefill": delta.arrived_tokens * self._token_s / passed_s, "decode": 0.0}
        if delta.tokens > 0 and delta.row_s > 0:
            decode_prompts = delta.decode_prompt_tokens * self._token_s / passed_s / workers["decode"]
            token_s = delta.row_s / delta.tokens * max(1 - decode_prompts, 0.1)
            least_s = min(self._min_token_s, token_s)
            if decode_prompts <= _MAX_PROMPTS:  # of a burst most may be computed after this window
                self._min_token_s = least_s
            work["decode"] = (1 - least_s / token_s) * workers["decode"]
        wait_s = (delta.prefill_waiting + delta.decode_waiting) * passed_s / max(delta.prompts, 1)
        wait = min(wait_s / self._slo.ttft_s, _MAX_WAIT)
        if delta.decode_waiting > workers["decode"]:  # prefill holds its slots until decode has pulled the KV
            work["decode"] += wait * workers["decode"] * self._max_rows
        else:
            work["prefill"] += wait * workers["prefill"]
        return work

    @property
    def _max_rows(self) -> float:
        """Maximum work of a decode worker's rows."""
        return 1 - self._min_token_s / self._slo.tpot_s

    def _loads(self, workers: dict[Stage, int], *, prefill_only: bool = False) -> dict[Stage, float]:
        """Return both loads with these workers; `prefill_only`: as if prefill computed all prompts."""
        prompts, rows = self._work["prefill"], self._work["decode"]
        prefill, decode = workers["prefill"], workers["decode"]
        chunk_s, capacity = 0.0 if prefill_only else self._chunk_tokens * self._token_s, decode * self._max_rows
        decode_prompts = cost = 0.0
        if chunk_s and rows < decode and self._min_token_s / (1 - rows / decode) + chunk_s <= self._slo.tpot_s:
            cost = 1 + self._min_token_s / chunk_s
            even = (prompts * capacity - rows * prefill) / (prefill + capacity)
            full = (prompts * decode - rows * prefill) / (cost * prefill + decode)
            decode_prompts = max(min(even, full), 0.0)
        return {
            "prefill": (prompts - decode_prompts) / prefill,
            "decode": max((rows + decode_prompts) / capacity, (rows + cost * decode_prompts) / decode),
        }

    def _decide(self, workers: dict[Stage, int], delta: Work, growing: set[Stage]) -> Move | None:
        after: dict[Stage, float] = {}
        separate, load = max(self._loads(workers, prefill_only=True).values()), max(self.loads.values())
        others: tuple[tuple[Stage, Stage], ...] = (("prefill", "decode"), ("decode", "prefill"))
        for role, other in others:
            if workers[role] > 1 and role not in growing:
                moved = {role: workers[role] - 1, other: workers[other] + 1}
                error = max(self._errors[one] / moved[one] for one in moved)
                most = separate * (1 - _GAIN) - _ERRORS * error
                improved = max(self._loads(moved, prefill_only=True).values()) <= most
                after[role] = max(self._loads(moved).values()) if improved else inf
        violated = delta.slo_violations / max(delta.slo_requests, 1)
        over_budget = violated > 1 - self._slo.objective
        pressed = separate > _BUSY or over_budget
        improving = [role for role in after if after[role] <= load * (1.0 if over_budget else 1 - _MIN_GAIN)]
        if not improving or not pressed:
            return None
        best = min(improving, key=lambda role: after[role])
        loads = ", ".join(f"{workers[name]} {name} workers have a load of {self.loads[name]:.2f}" for name in workers)
        return Move(
            best,
            f"{violated:.0%} of requests violate an SLO; {loads}; after the move the higher one is {after[best]:.2f}",
        )
