"""The control law: direction, step limits, convergence and damping of oscillation."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.node.config import NodeConfig, SloSection
from runtime.node.control.law import (
    DECODE_STALL_TARGET,
    DWELL_S,
    RESERVE_MAX,
    RESERVE_MIN,
    STEP,
    Change,
    ControlLaw,
    Readings,
    SignalMeter,
    Signals,
    quantile,
)
from runtime.node.control.loop import ControlLoop
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, PoolMetrics
from runtime.node.worker_config import PoolSection

WAIT_TARGET_S = 0.01
SLO = SloSection(ttft_s=20 * WAIT_TARGET_S)
LONGEST_S = SLO.prefill_wait_s  # of τ_pre
NODE = NodeConfig(pool=PoolSection(reserve=0.5), slo=SLO)
CALM = Signals(link_use=0.5, prefill_wait_p95_s=0.0, decode_stall=0.0)
PREFILL_WAITS = Signals(link_use=0.5, prefill_wait_p95_s=0.1, decode_stall=0.0)
DECODE_STALLS = Signals(link_use=0.5, prefill_wait_p95_s=0.0, decode_stall=0.9)
BUCKETS = len(PoolMetrics.WAIT["prefill"].buckets) + 1

SIGNALS = st.builds(
    Signals,
    link_use=st.none() | st.floats(0, 1),
    prefill_wait_p95_s=st.floats(0, 1),
    decode_stall=st.floats(0, 1),
)


def law(reserve: float = 0.5) -> ControlLaw:
    return ControlLaw(NodeConfig(pool=PoolSection(reserve=reserve), slo=SLO))


def fed(made: ControlLaw, *signals: Signals, interval_s: float = 0.25) -> list[tuple[float, Change]]:
    """Return the law's changes and their times, one update per signal."""
    changes: list[tuple[float, Change]] = []
    for i, now in enumerate(signals):
        if change := made.update(i * interval_s, now):
            changes.append((i * interval_s, change))
    return changes


def test_prefill_that_waits_too_long_gets_more_slots() -> None:
    made = law()
    ((_, change), *_) = fed(made, *[PREFILL_WAITS] * 6)
    assert (change.knob, change.before) == ("reserve", 0.5)
    assert change.after == pytest.approx(0.6)
    assert "prefill waits 100.00 ms" in change.cause


def test_stalling_decode_first_makes_prefill_yield_and_then_gets_slots_back() -> None:
    made = law()
    changes = [change for _, change in fed(made, *[DECODE_STALLS] * 11)]
    assert [change.knob for change in changes] == ["flush_prefill_s", "reserve"]
    assert [change.after for change in changes] == pytest.approx([LONGEST_S, 0.4])


def test_prefill_stops_yielding_when_no_query_waits() -> None:
    made = law(reserve=RESERVE_MIN)
    assert {change.knob for _, change in fed(made, *[DECODE_STALLS] * 40)} == {"flush_prefill_s"}
    for i in range(100):
        made.update(100 + i * 0.25, CALM)
    assert made.flush_prefill_s == 0


@pytest.mark.parametrize(("step_s", "most"), [(0.01, 0.8 * 0.8), (0.04, 0.25), (0.06, 0.25), (0.0, 0.25)])
def test_rows_may_stall_for_most_of_the_tpot_slo_minus_a_step(step_s: float, most: float) -> None:
    """A share of .64 beside steps of 10 ms where a token may take 50; never less than is configured."""
    made = ControlLaw(NodeConfig(slo=SloSection(tpot_s=0.05)))
    assert made.pressures(Signals(0.5, 0.0, most, step_s))[1] == pytest.approx(1.0)


def test_stalling_decode_takes_precedence_over_waiting_prefill() -> None:
    made = law(reserve=RESERVE_MIN)
    both = Signals(0.5, WAIT_TARGET_S * 30, DECODE_STALL_TARGET * 1.3)
    fed(made, *[both] * 40)
    assert made.flush_prefill_s == pytest.approx(LONGEST_S)


def test_the_flush_timeout_shrinks_before_the_reserve_grows() -> None:
    made = law()
    fed(made, *[DECODE_STALLS] * 8)
    knobs = [change.knob for _, change in fed(made, *[PREFILL_WAITS] * 60)]
    assert knobs[:5] == ["flush_prefill_s"] * 5
    assert knobs[6] == "reserve"
    assert made.flush_prefill_s == 0


@pytest.mark.parametrize("pressed", [PREFILL_WAITS, DECODE_STALLS])
def test_the_reserve_returns_to_its_configured_value_when_no_query_waits(pressed: Signals) -> None:
    made = law(0.5)
    fed(made, *[pressed] * 40)
    assert made.reserve in (RESERVE_MIN, RESERVE_MAX)
    values = []
    for i in range(100):
        made.update(100 + i * 0.25, CALM)
        values.append(made.reserve)
    assert made.reserve == pytest.approx(0.5)
    assert all(abs(after - before) <= STEP + 1e-12 for before, after in pairwise(values))


def test_the_reserve_stays_while_queries_still_wait() -> None:
    """Waits are under target, but the load that raised the reserve persists."""
    made = law(0.5)
    fed(made, *[PREFILL_WAITS] * 20)
    reserve = made.reserve
    for i in range(100):
        made.update(100 + i * 0.25, Signals(0.5, WAIT_TARGET_S * 0.6, 0.0))
    assert made.reserve == reserve > 0.5


def test_under_light_load_nothing_changes_whatever_the_link_utilization() -> None:
    light = Signals(link_use=0.001, prefill_wait_p95_s=0.0002, decode_stall=0.01)
    assert not fed(law(0.3), *[light] * 400)


def test_an_underused_link_alone_raises_the_reserve_while_prefill_queries_wait() -> None:
    waits = WAIT_TARGET_S * 0.3
    assert not fed(law(), *[Signals(0.5, waits, 0.0)] * 60)
    changes = fed(law(), *[Signals(0.0, waits, 0.0)] * 60)
    assert {change.knob for _, change in changes} == {"reserve"}
    assert changes[-1][1].after == RESERVE_MAX
    assert "KV link in use 0.0%" in changes[0][1].cause
    assert not fed(law(), *[Signals(0.0, 0.0, 0.0)] * 60)


@given(SIGNALS, st.floats(0, 1))
def test_constant_signals_converge(signals: Signals, reserve: float) -> None:
    made = law(reserve)
    fed(made, *[signals] * 400)
    assert not fed(made, *[signals] * 0)
    for i in range(400, 800):
        assert not made.update(i * 0.25, signals)


@given(st.lists(SIGNALS, min_size=2, max_size=300))
def test_the_size_and_rate_of_steps_are_bounded(signals: list[Signals]) -> None:
    made = law()
    changes = fed(made, *signals)
    for _, change in changes:
        if change.knob == "reserve":
            assert abs(change.after - change.before) <= STEP + 1e-12
            assert RESERVE_MIN <= change.after <= RESERVE_MAX
    for (earlier, _), (later, _) in pairwise(changes):
        assert later - earlier >= DWELL_S
    assert made.changes == len(changes)


@given(SIGNALS, SIGNALS)
def test_signals_that_alternate_at_every_update_change_nothing(one: Signals, other: Signals) -> None:
    made = law()
    pressures = [made.pressures(signals) for signals in (one, other)]
    if any(abs(a - b) > 0 for a, b in pressures) and fed(made, *[one, other] * 100):
        # only if both of them ask for the same is that one steady signal
        changes = [change for _, change in fed(law(), *[one, other] * 100)]
        assert len({(change.after > change.before) == (change.knob == "reserve") for change in changes}) == 1


@given(st.integers(2, 40))
def test_alternating_signals_move_the_reserve_within_dwell_and_step_limits(half_period: int) -> None:
    made = law()
    values = []
    for i in range(40 * half_period):
        made.update(i * 0.25, PREFILL_WAITS if (i // half_period) % 2 else DECODE_STALLS)
        values.append(made.reserve)
    late = values[20 * half_period :]
    moves = int(half_period * 0.25 / DWELL_S)
    assert max(late) - min(late) <= moves * STEP + 1e-9


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0), st.floats(0.1, 0.9))
def test_a_closed_loop_over_an_immediate_plant_converges(prefill_load: float, decode_load: float, start: float) -> None:
    """Waits fall and stalls rise with r: the law must converge to a value that balances both."""
    made = law(start)
    values = []
    for i in range(2000):
        wait_s = WAIT_TARGET_S * prefill_load * (1.2 - made.reserve)
        stall = min(1.0, DECODE_STALL_TARGET * decode_load * (0.2 + made.reserve))
        made.update(i * 0.25, Signals(0.5, wait_s, stall))
        values.append(made.reserve)
    assert max(values[1000:]) - min(values[1000:]) <= STEP / 4


# ---- the meter


def readings(
    link_s: float = 0, row_s: float = 0, stall_s: float = 0, *waits: int, tokens: float = 0, links: int = 1
) -> Readings:
    """`waits`: buckets that have one observation each."""
    return Readings(links, link_s, row_s, stall_s, tokens, [float(waits.count(bucket)) for bucket in range(BUCKETS)])


def test_signals_cover_the_interval_between_two_updates() -> None:
    meter = SignalMeter()
    assert meter.update(10.0, readings(5, 100, 50, 3, links=2)) == Signals(0, 0, 0)
    signals = meter.update(11.0, readings(5.5, 104, 51, 3, 5, tokens=60, links=2))
    assert signals.link_use == pytest.approx(0.5 / 2)
    assert signals.decode_stall == pytest.approx(0.25)
    assert signals.step_s == pytest.approx(3 / 60)
    assert PoolMetrics.WAIT["prefill"].buckets[4] < signals.prefill_wait_p95_s <= PoolMetrics.WAIT["prefill"].buckets[5]


def test_without_a_known_link_the_law_has_no_such_term() -> None:
    meter, waits = SignalMeter(), WAIT_TARGET_S * 0.9
    meter.update(10.0, readings(links=0))
    assert meter.update(11.0, readings(0, 0, 0, 3, links=0)).link_use is None
    assert not fed(law(), *[Signals(None, waits, 0.0)] * 60)
    (_, change), *_ = fed(law(), *[Signals(None, WAIT_TARGET_S * 3, 0.0)] * 60)
    assert "link" not in change.cause


def test_stalls_of_rows_that_have_ended_say_nothing_about_decode_now() -> None:
    meter = SignalMeter()
    meter.update(0, readings())
    assert meter.update(1, readings(0, 1, 1)).decode_stall == 1
    for i in range(2, 12):
        signals = meter.update(i, readings(0, 1, 1))
    assert signals.decode_stall < 0.01


@given(st.lists(st.floats(1e-5, 29), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_a_quantile_of_a_histogram_lies_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    edges = PoolMetrics.WAIT["prefill"].buckets
    counts = [0.0] * BUCKETS
    for value in values:
        counts[sum(edge < value for edge in edges)] += 1
    true = sorted(values)[min(int(q * len(values) - 1e-9), len(values) - 1)]
    bucket = sum(edge < true for edge in edges)
    low = edges[bucket - 1] if bucket else 0.0
    found = quantile(q, edges, counts)
    assert low - 1e-12 <= found <= edges[bucket] + 1e-12


# ---- the loop


@pytest.fixture
def tables() -> Iterator[dict[str, WorkerTable]]:
    made = {
        "pool-0": WorkerTable.create("pool", "pool-0", SloSection()),
        "pool-1": WorkerTable.create("pool", "pool-1", SloSection()),
        "decode-0": WorkerTable.create("decode", "decode-0", SloSection()),
    }
    yield made
    for table in made.values():
        table.close()


def test_the_loop_sets_the_knobs_of_every_pool_and_logs_the_cause(
    tables: dict[str, WorkerTable], caplog: pytest.LogCaptureFixture
) -> None:
    loop = ControlLoop(NODE, tables)
    assert [tables[name].knob("reserve") for name in ("pool-0", "pool-1")] == [0.5, 0.5]
    with caplog.at_level("INFO", "control"):
        for i in range(11):
            tables["decode-0"].add(DecodeMetrics.ROW_SECONDS, 1.0)
            tables["decode-0"].add(DecodeMetrics.STALL_SECONDS, 0.9)
            loop.step(100 + i * 0.25)
    assert [tables[name].knob("reserve") for name in ("pool-0", "pool-1")] == pytest.approx([0.4, 0.4])
    assert "decode stalls 90.0%" in caplog.text
    figures = {family.name: family.samples[0].value for family in loop.families() if "control" in family.name}
    assert figures == {
        "trinity_control_reserve": pytest.approx(0.4),
        "trinity_control_flush_prefill_seconds": pytest.approx(LONGEST_S),
        "trinity_control_changes": 2,
    }


def test_the_loop_samples_once_per_interval(tables: dict[str, WorkerTable]) -> None:
    loop = ControlLoop(NODE, tables)
    for i in range(100):
        tables["pool-0"].observe(PoolMetrics.WAIT["prefill"], 1.0)
        loop.step(1 + i * 0.002)  # a fifth of a second
    assert loop.law.changes == 0
    for i in range(100):
        tables["pool-0"].observe(PoolMetrics.WAIT["prefill"], 1.0)
        loop.step(1.25 + i * 0.25)
    assert loop.law.reserve == RESERVE_MAX


# ---- as shipped


def test_a_configured_reserve_below_the_minimum_is_the_minimum() -> None:
    assert law(0.05).reserve == 0.05
    assert law(0.95).reserve == RESERVE_MAX
