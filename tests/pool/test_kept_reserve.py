"""Tests of the reserve of a pool on a GPU: while prefill is present, decode leaves its slots free, used or not."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runtime.node.config import parse_config
from runtime.simulator.policies import PolicyChoice
from tests.pool.scheduler import Entry, Scheduler
from tests.pool.scheduler_factories import LONG, entry, filled, measured, names, scheduler


def kept(slots: int, reserve: float, **policy: Any) -> Scheduler:
    return scheduler(slots, reserve, keep_reserve=True, **policy)


@given(st.integers(1, 64), st.floats(0.01, 1.0), st.integers(1, 8))
def test_decode_fills_no_more_than_its_share_while_prefill_is_present(slots: int, reserve: float, present: int) -> None:
    made = kept(slots, reserve)
    filled(made, *(entry("prefill", -1 - name) for name in range(present)))
    filled(made, *(entry("decode", name) for name in range(2 * slots)))
    share = max(slots - math.ceil(reserve * slots), 1)
    active: list[Entry] = []
    for now in range(present):
        active += [one for one in made.next(now).admitted if one.stage == "prefill"]
        assert made.running["decode"] == min(share, slots - len(active))
        assert active, "at least one is served"
        made.finished(active.pop(), 10)
    made.next(present)
    assert made.running == {"prefill": 0, "decode": slots}, "decode gets every slot once prefill is gone"


def test_decode_is_not_paused_for_its_share_but_leaves_slots_as_its_queries_finish() -> None:
    decode = [entry("decode", name) for name in range(20)]
    made = filled(kept(8, 0.5), *decode)
    made.next(0)
    made.finished(decode[0], 10)
    filled(made, entry("prefill", 100, arrival=1), now=1)
    changes = made.next(1)
    assert (names(changes.admitted), changes.paused) == ([100], [])
    for number in range(1, 4):
        made.finished(decode[number], 10)
        assert made.next(2).admitted == []
    made.finished(decode[4], 10)
    assert names(made.next(3).admitted) == [8]
    assert made.running == {"prefill": 1, "decode": 4}


def test_a_prefill_query_finds_a_free_slot_and_pauses_no_decode_query_while_another_is_present() -> None:
    made = filled(kept(8, 0.25), entry("prefill", -1), *(entry("decode", name) for name in range(20)))
    made.next(0)
    filled(made, entry("prefill", -2, arrival=1), now=1)
    changes = made.next(1)
    assert (names(changes.admitted), changes.paused) == ([-2], [])


def test_a_short_decode_query_still_preempts_a_long_one_within_the_share() -> None:
    made = measured(kept(4, 0.5), 10, 10)
    filled(made, entry("prefill", -1), *(entry("decode", name, top_m=LONG) for name in range(4)))
    made.next(0)
    filled(made, entry("decode", 10, arrival=1), now=1)
    changes = made.next(1)
    assert (len(changes.paused), names(changes.admitted)) == (1, [10])
    assert made.running == {"prefill": 1, "decode": 2}


def test_only_a_pool_on_a_gpu_keeps_the_reserve_free() -> None:
    def keeps(**pool: Any) -> bool:
        config = parse_config({"pool": pool, "collections": [{"name": "docs", "path": "/nowhere"}]})
        return PolicyChoice("configured").rules(config, 8).keep_reserve

    assert not keeps()
    assert keeps(devices=["cuda:0"])
