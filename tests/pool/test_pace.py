"""When the pool's loop looks around."""

import pytest

from ipc import Stage
from runtime.pool.pace import ends_round, round_ns
from runtime.pool.policy import Policy
from runtime.pool.scheduler import Scheduler
from tests.pool.schedulers import entry


def waiting(decode: int, prefill: int = 0, **policy: int) -> Scheduler[int]:
    made: Scheduler[int] = Scheduler(Policy(slots=4, **policy))
    for name in range(decode):
        made.add(entry("decode", name), 0)
    for name in range(decode, decode + prefill):
        made.add(entry("prefill", name), 0)
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
    made = waiting(4, spare=1, prefill_target_ns=0)
    made.next(0)
    quiet = round_ns(made)
    made.add(entry("prefill", 9), 0)
    made.next(0)
    assert (made.paused, made.waiting) == (1, {"prefill": 0, "decode": 0})
    assert round_ns(made) < quiet


def test_paused_queries_make_a_crowd_as_waiting_ones_do() -> None:
    made = waiting(4, spare=4, prefill_target_ns=0)
    made.reserve = 1.0
    made.next(0)
    for name in range(10, 13):
        made.add(entry("prefill", name), 0)
    made.next(0)
    assert (made.paused, made.crowded) == (3, True)
    assert not ends_round(made, ["decode"])
