"""Tests of preemption: of decode by prefill, within reserve, credit and bounds, in bursts; of long by short queries."""

from tests.pool.scheduler import Changes, Entry, Scheduler
from tests.pool.scheduler_factories import LONG, USUAL, entry, filled, measured, names, scheduler, with_credit


def test_a_prefill_query_without_slack_preempts_the_decode_query_with_most_extends_left() -> None:
    decode = [entry("decode", 0), entry("decode", 1, top_m=LONG), entry("decode", 2)]
    made = filled(scheduler(2, 0.5, prefill_target_ns=100, rules="paper"), *decode)
    made.next(0)
    late = entry("prefill", 10, arrival=5)
    filled(made, late)
    assert made.next(50) == Changes()  # there is time
    changes = made.next(105)
    assert (names(changes.paused), names(changes.admitted)) == ([1], [10])
    assert (made.running, made.paused) == ({"prefill": 1, "decode": 1}, 1)
    made.finished(late, 9)
    assert names(made.next(106).resumed) == [1]  # and no waiting query
    made.finished(decode[0], 9)
    assert names(made.next(107).admitted) == [2]


def test_remaining_extends_account_for_completed_ones() -> None:
    older, younger = entry("decode", 0, top_m=LONG), entry("decode", 1)
    made = filled(scheduler(2, 0.5, prefill_target_ns=1, rules="paper"), older)
    made.next(0)
    made.advanced(100, 100)
    filled(made, younger, now=1)
    made.next(1)
    filled(made, entry("prefill", 2, arrival=2), now=2)
    assert names(made.next(5).paused) == [1]  # it has 13 extends left, the long one 3


def test_preemption_for_slack_is_limited_to_prefills_reserve() -> None:
    made = filled(scheduler(8, 0.25, prefill_target_ns=1, rules="paper"), *(entry("decode", name) for name in range(8)))
    made.next(0)
    filled(made, *(entry("prefill", name, arrival=1) for name in range(10, 18)))
    assert len(made.next(50).admitted) == 2
    made.tables.reserve = 0.75
    made.next(50)
    assert made.running == {"prefill": 6, "decode": 2}


def test_a_decode_query_advances_by_an_extend_between_two_pauses() -> None:
    """So its pauses are no more than its extends, and after each it waits for the aging time at most."""
    made = filled(scheduler(1, 1.0, prefill_target_ns=0), entry("decode", 1))
    made.next(0)
    for turn in range(3):
        late = entry("prefill", 10 + turn, arrival=10 * turn)
        filled(made, late)
        assert names(made.next(10 * turn).paused) == [1]
        made.finished(late, 9)
        assert names(made.next(10 * turn + 1).resumed) == [1]
        made.advanced(1, 1)


def test_after_the_aging_time_the_oldest_decode_query_runs_regardless_of_the_reserve() -> None:
    made = filled(scheduler(1, 1.0, aging_ns=100), entry("decode", 1))
    running: list[Entry] = []
    for now in range(0, 200, 10):
        filled(made, entry("prefill", 10 + now, arrival=now))
        if running:
            made.finished(running.pop(), 5)
        running += made.next(now).admitted
        if running[0].query == 1:
            break
    assert now == 100
    filled(made, entry("prefill", 999, arrival=now))
    with_credit(made)
    assert made.next(now) == Changes()  # and is no longer paused


# ---- virtual deadlines


def test_a_shorter_decode_query_passes_slightly_earlier_longer_ones() -> None:
    made = measured(scheduler(1, 0.0, engine_slots=1), 1, 10)
    # An extend of one slot takes 11 ns; virtual deadlines are after 6 times 128 and 16 of them.
    order = order_of_short_ones_behind_long_ones(made, (6_500, 7_000, 7_500))  # 8,448 - 1,056 = 7,392 is too late
    assert order == [1, 4, 5, 2, 3, 6]


def order_of_short_ones_behind_long_ones(made: Scheduler, came: tuple[int, int, int]) -> list[int]:
    """Return the order in which 1, long queries 2 and 3 (arriving at 1 and 2) and later arrivals 4, 5, 6 run."""
    for name, arrival, top_m in ((1, 0, USUAL), (2, 1, LONG), (3, 2, LONG)):
        filled(made, entry("decode", name, top_m=top_m, arrival=arrival))
    for name, arrival in zip((4, 5, 6), came, strict=True):
        filled(made, entry("decode", name, arrival=arrival), now=arrival)
    order = []
    for _ in range(6):
        (one,) = made.next(20_000).admitted
        made.finished(one, 103 if one.top_m == LONG else 13)
        order.append(one.query)
    return order


def test_decode_queries_of_a_class_keep_their_order_when_estimates_change() -> None:
    made = measured(scheduler(1, 0.0), 10, 100)
    filled(made, entry("decode", 1))
    measured(made, 0, 1)
    filled(made, entry("decode", 2, arrival=1), now=1)
    order = []
    for _ in range(2):
        (one,) = made.next(3).admitted
        made.finished(one, 9)
        order.append(one.query)
    assert order == [1, 2]


def test_a_much_shorter_decode_query_preempts_a_long_one_which_resumes_later() -> None:
    made = filled(measured(scheduler(1, 0.0, engine_slots=3), 1, 10), entry("decode", 1, top_m=LONG))
    made.next(0)
    made.advanced(10, 110)
    filled(made, entry("decode", 2, arrival=5), now=5)
    changes = made.next(5)
    assert (names(changes.paused), names(changes.admitted)) == ([1], [2])
    filled(made, entry("decode", 3, top_m=LONG, arrival=6), now=6)
    made.finished(changes.admitted[0], 13)
    assert made.next(7) == Changes(resumed=changes.paused)  # and the other long query waits
    made.advanced(68, 68 * 11)
    filled(made, entry("decode", 4, arrival=8), now=8)
    assert made.next(8) == Changes()  # it has 25 of 103 extends left: less than twice as many


def test_a_stream_of_short_decode_queries_does_not_starve_a_long_one() -> None:
    made = measured(scheduler(1, 0.0), 0.01, 1)  # an extend takes 1 ns
    active: dict[Entry, int] = {}
    left = {1: 103}
    filled(made, entry("decode", 1, top_m=LONG))
    for now in range(3000):
        if now % 4 == 0:
            left[100 + now] = 4
            filled(made, entry("decode", 100 + now, top_m=4, arrival=now), now=now)
        changes = made.next(now)
        active |= {one: 0 for one in (*changes.admitted, *changes.resumed)}
        for one in changes.paused:
            del active[one]
        made.advanced(1, 1)
        (one,) = active
        left[one.query] -= 1
        if not left[one.query]:
            del active[one]
            made.finished(one, 103 if one.query == 1 else 4)
            if one.query == 1:
                break
    assert now <= 6 * 128 + 103 + 8


# ---- credit


def test_prefill_earns_credit_for_its_unused_share_and_spends_it_with_all_slots() -> None:
    made = measured(scheduler(2, 0.3, aging_ns=1000), 0, 100)
    filled(made, *(entry("decode", name) for name in range(3)))
    made.next(0)
    for _ in range(10):
        made.advanced(1, 200)
    assert made.tables.credit_ns == 0.3 * 2000
    prefill = [entry("prefill", name, arrival=1) for name in (10, 11)]
    filled(made, *prefill)
    changes = made.next(1)  # at once, although it has slack
    assert (names(changes.admitted), sorted(names(changes.paused))) == ([10, 11], [0, 1])
    extends = 0
    while made.running["decode"] == 0:
        made.advanced(1, 200)
        extends += 1
        if extends == 5:  # 0.7 · 200 ns each: the credit is used up
            made.finished(prefill[0], 5)
        made.next(2)
    assert extends == 5


def test_credit_is_capped_at_the_aging_time_and_not_earned_while_decode_is_idle() -> None:
    made = filled(scheduler(2, 0.5, aging_ns=1000), entry("decode", 1))
    made.next(0)
    made.advanced(1, 10_000_000)
    assert made.tables.credit_ns == 1000
    alone = filled(scheduler(2, 0.5, aging_ns=1000), entry("prefill", 1))
    alone.next(0)
    alone.advanced(1, 100)
    assert alone.tables.credit_ns == 0


# ---- bursts


def in_burst(made: Scheduler, prefill: int) -> list[Entry]:
    """Add `prefill` prefill queries while decode has all slots and prefill has credit."""
    filled(made, *(entry("decode", number) for number in range(8)))
    made.next(0)
    with_credit(made)
    came = [entry("prefill", 100 + number, arrival=1) for number in range(prefill)]
    filled(made, *came)
    made.next(1)
    return came


def test_up_to_the_reserve_prefill_queries_share_the_batch_with_decode() -> None:
    made = scheduler(8, 0.25)
    in_burst(made, 2)
    assert made.running == {"prefill": 2, "decode": 6}


def test_a_burst_of_more_prefill_queries_than_reserved_slots_has_the_batch_to_itself() -> None:
    made = measured(scheduler(8, 0.25), 1, 10)
    active = []
    for one in in_burst(made, 3):
        active.append(made.running)
        made.finished(one, 13)
        made.next(2)
    assert active == [{"prefill": left, "decode": 0} for left in (3, 2, 1)]
    assert made.running == {"prefill": 0, "decode": 8}
    filled(made, entry("prefill", 200, arrival=3))
    made.next(3)
    assert made.running == {"prefill": 1, "decode": 7}


def test_a_burst_ends_when_the_credit_is_used_up() -> None:
    made = measured(scheduler(8, 0.25, aging_ns=1000), 1, 10)
    in_burst(made, 3)
    assert made.running == {"prefill": 3, "decode": 0}
    while made.tables.credit_ns:
        made.advanced(1, 100)
    made.next(2)
    assert made.running == {"prefill": 3, "decode": 5}
