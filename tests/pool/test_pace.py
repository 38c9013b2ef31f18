"""When the pool's loop looks around."""

import pytest

from ipc import Stage
from runtime.pool.estimate import Kind
from runtime.pool.pace import ends_round, round_ns
from runtime.pool.policy import Policy
from runtime.pool.queues import NEVER_NS, Entry
from runtime.pool.scheduler import Scheduler


def waiting(decode: int, prefill: int = 0) -> Scheduler[int]:
    made: Scheduler[int] = Scheduler(Policy(slots=4))
    for stage, count in (("decode", decode), ("prefill", prefill)):
        for name in range(count):
            made.add(Entry(stage, NEVER_NS, 0, name, Kind("docs", 64, 4)), 0)  # type: ignore[arg-type]
    return made


def test_a_round_is_shorter_while_someone_waits_and_longer_again_in_a_crowd() -> None:
    quiet, some, crowd = (round_ns(waiting(count)) for count in (0, 1, 3))
    assert some < crowd < quiet


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_an_answer_goes_out_at_once_while_no_crowd_waits(stage: Stage) -> None:
    assert ends_round(waiting(2), [stage])
    assert not ends_round(waiting(2), [])


def test_in_a_crowd_answers_to_decode_wait_for_the_rounds_end_and_answers_to_prefill_do_not() -> None:
    crowd = waiting(2, prefill=1)
    assert not ends_round(crowd, ["decode", "decode"])
    assert ends_round(crowd, ["decode", "prefill"])


def test_a_paused_query_keeps_rounds_short_since_it_is_to_go_on() -> None:
    made = waiting(4)
    made.next(0)
    assert not made.held_back
    made.add(
        Entry(
            "prefill",
            NEVER_NS,
            0,
            9,
            Kind("docs", 64, 4),
        ),
        0,
    )
    assert made.held_back
