"""The policy's decisions for fixed arrivals, compared with the recorded ones: a change of the code alone changes none.

`python -m tests.pool.test_decisions` records them anew, after a change of a rule.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded
from runtime.pool.settings import Policy
from runtime.pool.tables import NEVER_NS
from tests.pool.scheduler import Entry, Scheduler

RECORDED = Path(__file__).parent / "decisions"
_MS = 1_000_000
_ROUNDS = 400
_CASES: dict[str, dict[str, Any]] = {
    "trinity": {},
    "trinity-without-spare-slots": {"engine_slots": 6, "reserve": 0.7},
    "trinity-missed": {"missed_ns": 4 * _MS, "reserve": 0.2},
    "trinity-bursts": {"reserve": 0.1, "flush_prefill_ns": 0},
    "trinity-keeps-its-reserve": {"keep_reserve": True},
    "paper": {"rules": "paper"},
}
_USUAL: dict[str, Any] = {
    "slots": 6, "engine_slots": 9, "queue": 16, "reserve": 0.4, "prefill_target_ns": 20 * _MS, "aging_ns": 12 * _MS,
    "flush_prefill_ns": _MS, "missed_ns": 200 * _MS,
}  # fmt: skip


def decisions(name: str) -> Iterator[str]:
    """Yield a line for each round of a case in which something is decided: time, verdicts on arrivals, changes, and the
    credit afterwards."""
    drawn = Random(name)
    made = Scheduler(Policy(**(_USUAL | _CASES[name])))
    now = number = 0
    left: dict[Entry, int] = {}  # extends of the queries with slots
    total: dict[Entry, int] = {}
    active: dict[Entry, None] = {}  # in order of their start
    waiting: dict[int, Entry] = {}
    for turn in range(_ROUNDS):
        line = [f"{now}"]
        load = (0.1, 0.7, 0.0, 1.6)[turn // 15 % 4]
        for _ in range(int(load + drawn.random())):
            stage: Stage = "prefill" if drawn.random() < 0.4 else "decode"
            deadline = now + int(30 * _MS * drawn.random()) if drawn.random() < 0.3 else NEVER_NS
            one = Entry(stage, now, number, deadline, int(2 * drawn.random()), drawn.choice([16, 40, 40, 64, 400]))
            try:
                made.add(one, now)
                waiting[number] = one
                line.append(f"{stage[0]}{number}")
            except (Overloaded, DeadlineExceeded) as error:
                line.append(f"{type(error).__name__}{number}")
            number += 1
        if waiting and drawn.random() < 0.05:
            cancelled = waiting.pop(drawn.choice(list(waiting)))
            made.left(cancelled)
            line.append(f"left{cancelled.query}")
        changes = made.next(now)
        for sign, changed in zip(
            "+-*!", (changes.admitted, changes.paused, changes.resumed, changes.late), strict=True
        ):
            line += [f"{sign}{one.query}" for one in changed]
        for one in (*changes.admitted, *changes.late):
            del waiting[one.query]
        for one in changes.paused:
            del active[one]
        active.update(dict.fromkeys(changes.resumed))
        active.update(dict.fromkeys(changes.admitted))
        total.update({one: 2 + one.top_m // 4 + int(4 * drawn.random()) for one in changes.admitted})
        left.update({one: total[one] for one in changes.admitted})
        if not active:
            now += _MS
            if line[1:]:
                yield " ".join(line)
            continue
        extends = min(min(left[one] for one in active), 1 + int(6 * drawn.random()))
        took = int(extends * (60_000 + 25_000 * len(active)) * (1 - 0.2 * math.log(1 - 0.9 * drawn.random())))
        made.advanced(extends, took)
        now += took
        for one in list(active):
            left[one] -= extends
            if not left[one]:
                del active[one]
                made.finished(one, total[one])
        if line[1:]:
            yield " ".join([*line, f"r {made.tables.credit_ns:.6g}"])


@pytest.mark.parametrize("name", _CASES)
def test_the_decisions_for_fixed_arrivals_are_the_recorded_ones(name: str) -> None:
    recorded = (RECORDED / f"{name}.txt").read_text().splitlines()
    for found, expected in zip(decisions(name), recorded, strict=True):
        assert found == expected


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for case in _CASES:
        (RECORDED / f"{case}.txt").write_text("\n".join(decisions(case)) + "\n")
