"""Who gives an active place to whom: long decode queries to short ones, decode to late prefill, and not without end."""

from runtime.pool.estimate import Kind
from runtime.pool.queues import Entry
from runtime.pool.scheduler import Round
from tests.pool.schedulers import LONG, advanced, entry, filled, measured, names, scheduler

# ---- short and long decode queries


def test_a_long_decode_query_gives_its_place_to_a_much_shorter_one_and_goes_on_where_it_was() -> None:
    made = filled(measured(scheduler(1, 0.0, spare=2), 1, 10), entry("decode", 1, kind=LONG))
    made.next(0)
    filled(advanced(made, 10), entry("decode", 2, arrival=5), now=5)
    changes = made.next(5)
    assert (names(changes.paused), names(changes.admitted)) == ([1], [2])
    short = changes.admitted[0]
    filled(made, entry("decode", 3, kind=LONG, arrival=6), now=6)
    made.finished(short, 13)
    assert made.next(7) == Round(resumed=changes.paused)  # and the other long one waits
    filled(advanced(made, 68), entry("decode", 4, arrival=8), now=8)
    assert made.next(8) == Round()  # 25 of its 103 extends are left: less than twice as many


def test_a_long_decode_query_keeps_a_place_that_nobody_lacks_and_one_that_is_its_turn() -> None:
    made = filled(measured(scheduler(2, 0.0, spare=2), 10, 0), entry("decode", 1, kind=LONG))
    made.next(0)
    filled(made, entry("decode", 2, arrival=1), now=1)
    assert made.next(1).paused == []
    filled(made, entry("decode", 3, arrival=20_000), now=20_000)
    assert made.next(20_000) == Round()


def test_shorter_decode_queries_leave_half_of_the_spare_slots_to_prefill() -> None:
    made = measured(scheduler(4, 0.5, spare=4), 1000, 0)
    filled(made, *(entry("decode", name, kind=LONG) for name in range(4)))
    made.next(0)
    filled(made, *(entry("decode", name, arrival=1) for name in range(4, 8)), now=1)
    assert len(made.next(1).paused) == 2
    filled(made, *(entry("prefill", name, arrival=2) for name in range(8, 10)), now=2)
    made.next(1 << 61)
    assert made.running["prefill"] == 2


def test_short_decode_queries_without_end_do_not_starve_a_long_one() -> None:
    made = measured(scheduler(1, 0.0, spare=1), 1, 0)  # an extend takes 1
    short = Kind("docs", 1, 1)  # 4 extends, and one comes whenever one ends
    active: dict[Entry[int], int] = {}
    left = {1: 103}
    filled(made, entry("decode", 1, kind=LONG))
    for now in range(3000):
        if now % 4 == 0:
            left[100 + now] = 4
            filled(made, entry("decode", 100 + now, kind=short, arrival=now), now=now)
        changes = made.next(now)
        active |= {one: 0 for one in (*changes.admitted, *changes.resumed)}
        for one in changes.paused:
            del active[one]
        made.advanced(1)
        (one,) = active
        left[one.query] -= 1
        if not left[one.query]:
            del active[one]
            made.finished(one, 103 if one.query == 1 else 4)
            if one.query == 1:
                break
    assert 16 * 128 - 16 * 8 <= now <= 16 * 128 + 103 + 4


# ---- preemption


def test_a_prefill_query_without_slack_takes_the_youngest_decode_querys_place_which_goes_on_later() -> None:
    decode = [entry("decode", name) for name in range(3)]
    made = filled(scheduler(2, 0.5, spare=1, prefill_target_ns=100), *decode)
    made.next(0)
    late = entry("prefill", 10, arrival=5)
    filled(made, late)
    assert made.next(50) == Round()  # there is time
    changes = made.next(105)
    assert (names(changes.paused), names(changes.admitted)) == ([1], [10])
    assert (made.running, made.paused) == ({"prefill": 1, "decode": 1}, 1)
    made.finished(late, 9)
    assert names(made.next(106).resumed) == [1]
    made.finished(decode[0], 9)
    assert names(made.next(107).admitted) == [2]


def test_as_many_decode_queries_are_active_as_leave_prefill_in_time() -> None:
    made = measured(scheduler(8, 0.5, spare=8), 1, 10)
    filled(made, *(entry("decode", name) for name in range(8)))
    assert len(made.next(0).admitted) == 8
    urgent = entry("prefill", 10, deadline=13 * 52)  # 13 extends with five active ones take less than that
    filled(made, urgent)
    changes = made.next(0)
    assert (names(changes.admitted), names(changes.paused)) == ([10], [7, 6, 5, 4])
    assert made.running == {"prefill": 1, "decode": 4}


def test_where_fewer_in_an_extend_do_not_make_it_faster_only_a_place_is_taken_for_a_late_query() -> None:
    for target in (0, 100):
        made = measured(scheduler(8, 0.5, spare=8, prefill_target_ns=target), fixed=1000, each=1)  # as on a GPU
        filled(made, *(entry("decode", name) for name in range(8)))
        made.next(0)
        filled(made, entry("prefill", 10))
        assert names(made.next(50).paused) == [7]
        assert made.running == {"prefill": 1, "decode": 7}


def test_pauses_cost_those_who_wait_nothing_unless_prefill_is_to_be_answered_as_soon_as_possible() -> None:
    active = {}
    for target in (0, 100):
        made = measured(scheduler(8, 0.5, spare=8, prefill_target_ns=target), fixed=2, each=10)
        filled(made, *(entry("decode", name) for name in range(100)))
        made.next(0)
        filled(made, entry("prefill", 100))
        made.next(50)  # it is late, even were it alone
        active[target] = made.running["decode"]
    assert active == {0: 0, 100: 7}


def test_preemption_takes_no_more_places_than_prefill_is_owed() -> None:
    made = filled(scheduler(8, 0.25, spare=8, prefill_target_ns=1), *(entry("decode", name) for name in range(8)))
    made.next(0)
    filled(made, *(entry("prefill", name, arrival=1) for name in range(10, 18)))
    assert len(made.next(50).admitted) == 2
    made.reserve = 0.75
    made.next(50)
    assert made.running == {"prefill": 6, "decode": 2}


def test_without_spare_slots_nothing_is_preempted_beyond_the_engine() -> None:
    made = filled(scheduler(2, 0.5, prefill_target_ns=0), *(entry("decode", name) for name in range(2)))
    made.next(0)
    filled(made, entry("prefill", 10))
    assert made.next(10) == Round()


def test_a_decode_query_is_paused_a_bounded_number_of_times() -> None:
    made = filled(scheduler(1, 1.0, spare=1, prefill_target_ns=0, max_pauses=2), entry("decode", 1))
    made.next(0)
    for turn in range(2):
        late = entry("prefill", 10 + turn, arrival=10 * turn)
        filled(made, late)
        assert names(made.next(10 * turn).paused) == [1]
        made.finished(late, 9)
        assert names(made.next(10 * turn + 1).resumed) == [1]
    filled(made, entry("prefill", 20, arrival=30))
    assert made.next(30) == Round()


def test_when_no_decode_query_ran_for_the_stall_bound_the_oldest_does_whatever_the_reserve() -> None:
    made = filled(scheduler(1, 1.0, decode_stall_ns=100), entry("decode", 1))
    running: list[Entry[int]] = []
    for now in range(0, 200, 10):
        filled(made, entry("prefill", 10 + now, arrival=now))
        if running:
            made.finished(running.pop(), 5)
        running += made.next(now).admitted
        if running[0].query == 1:
            break
    assert now == 100
