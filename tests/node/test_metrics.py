"""Metrics tables written by workers, and the supervisor's Prometheus text."""

import math
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from ipc import MemoryRefused, SharedMemory
from runtime.node.config import SloSection
from runtime.node.metrics.exporter import render, table_families
from runtime.node.metrics.table import State, WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, FrontendMetrics, PoolMetrics


@pytest.fixture
def table() -> Iterator[WorkerTable]:
    made = WorkerTable.create("pool", "pool-0", SloSection())
    yield made
    made.close()


def parsed(tables: dict[str, WorkerTable]) -> dict[str, Family]:
    text = render(table_families(tables))
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(family: Family, suffix: str = "") -> dict[str, float]:
    """By worker, or for buckets by `le`."""
    found = [sample for sample in family.samples if sample.name == family.name + suffix]
    return {sample.labels.get("le", sample.labels["worker"]): sample.value for sample in found}


def test_the_text_contains_the_values_written_by_workers(table: WorkerTable) -> None:
    other = WorkerTable.create("pool", "pool-1", SloSection())
    worker = WorkerTable.open(table.reference, "pool", SloSection())
    worker.begin(epoch=1, pid=42)
    worker.add(PoolMetrics.QUERIES["decode"], 3)
    worker.add(PoolMetrics.QUERIES["decode"])
    worker.set(PoolMetrics.CLIENTS, 7)
    found = parsed({"pool-0": table, "pool-1": other})
    decode = [s for s in found["trinity_pool_queries"].samples if s.labels["stage"] == "decode"]
    assert {sample.labels["worker"]: sample.value for sample in decode} == {"pool-0": 4, "pool-1": 0}
    assert samples(found["trinity_pool_clients"]) == {"pool-0": 7, "pool-1": 0}
    worker.close()
    other.close()


EDGES = PoolMetrics.LATENCY.buckets


@settings(max_examples=30)
@given(st.lists(st.floats(0.0, 100.0) | st.sampled_from(EDGES), max_size=60))
@example([*EDGES, math.nextafter(EDGES[-1], math.inf)])
def test_a_histogram_counts_every_value_in_all_buckets_that_hold_it(values: list[float]) -> None:
    made = WorkerTable.create("pool", "pool-0", SloSection())
    for value in values:
        made.observe(PoolMetrics.LATENCY, value)
    family = parsed({"pool-0": made})[PoolMetrics.LATENCY.name]
    buckets = samples(family, "_bucket")
    assert [float(le) for le in buckets] == [*EDGES, math.inf]
    assert buckets == {le: sum(value <= float(le) for value in values) for le in buckets}
    assert samples(family, "_count") == {"pool-0": len(values)}
    assert samples(family, "_sum")["pool-0"] == pytest.approx(sum(values))
    made.close()


def test_slo_limits_are_bucket_edges_and_inclusive() -> None:
    slo = SloSection(ttft_s=0.333, search_s=0.0123)
    made = WorkerTable.create("frontend", "frontend-0", slo)
    worker = WorkerTable.open(made.reference, "frontend", slo)
    for value in (0.0123, math.nextafter(0.0123, 1.0)):
        worker.observe(FrontendMetrics.SEARCH_TIME, value)
    family = parsed({"frontend-0": made})[FrontendMetrics.SEARCH_TIME.name]
    assert samples(family, "_bucket")["0.0123"] == 1
    assert samples(family, "_bucket")["0.025"] == 2
    edges = DecodeMetrics.TTFT.edges(slo)
    assert 0.333 in edges
    assert list(edges) == sorted(edges)
    worker.close()
    made.close()


def test_a_table_with_other_slo_limits_is_refused() -> None:
    made = WorkerTable.create("frontend", "frontend-0", SloSection(search_s=0.0123))
    with pytest.raises(ValueError, match="words"):
        WorkerTable.open(made.reference, "frontend", SloSection())
    made.close()


def test_every_sample_has_node_and_model_labels(table: WorkerTable) -> None:
    text = render(table_families({"pool-0": table}), {"node": "n", "model_name": "m"})
    families = list(text_string_to_metric_families(text))
    assert families
    for sample in (sample for family in families for sample in family.samples):
        assert (sample.labels["node"], sample.labels["model_name"]) == ("n", "m")


def test_counters_and_histograms_survive_a_new_process_and_gauges_start_at_zero(table: WorkerTable) -> None:
    for epoch in (1, 2):
        worker = WorkerTable.open(table.reference, "pool", SloSection())
        worker.begin(epoch, pid=100 + epoch)
        assert worker.state is State.STARTING
        worker.add(PoolMetrics.EXTENDS, 10)
        worker.observe(PoolMetrics.LATENCY, 0.002)
        if epoch == 1:
            worker.set(PoolMetrics.ACTIVE_SLOTS, 5)
            worker.state = State.READY
        worker.close()
    found = parsed({"pool-0": table})
    assert table.epoch == 2
    assert samples(found["trinity_pool_extends"], "_total") == {"pool-0": 20}
    assert samples(found["trinity_pool_active_slots"]) == {"pool-0": 0}
    assert samples(found[PoolMetrics.LATENCY.name], "_count") == {"pool-0": 2}


def test_heartbeat_age_counts_from_the_last_beat_or_the_creation_of_the_table(table: WorkerTable) -> None:
    assert table.age_s(_beat_of(table)) == 0
    table.beat()
    assert table.age_s(_beat_of(table) + 1_500_000_000) == 1.5
    assert table.age_s(_beat_of(table) - 1_000) == 0, "a heartbeat may follow the clock reading"


def _beat_of(table: WorkerTable) -> int:
    """Return the time of the last beat, computed from its age at a known time."""
    now_ns = time.monotonic_ns()
    return now_ns - round(table.age_s(now_ns) * 1e9)


def test_a_table_of_another_role_or_foreign_memory_is_refused(table: WorkerTable) -> None:
    with SharedMemory.create("other", 4096) as memory, pytest.raises(ValueError, match="not a table"):
        WorkerTable.open(memory.reference, "pool", SloSection())
    reference = table.reference
    table.close()
    with pytest.raises(MemoryRefused):
        WorkerTable.open(reference, "pool", SloSection())


def test_a_knob_starts_at_the_configured_value_and_keeps_the_supervisors_setting(table: WorkerTable) -> None:
    worker = WorkerTable.open(table.reference, "pool", SloSection())
    assert math.isnan(table.knob("reserve"))
    worker.begin_knob("reserve", 0.3)
    assert table.knob("reserve") == 0.3
    table.set_knob("reserve", 0.5)
    worker.begin(2, 1)  # a new process in the same table
    worker.begin_knob("reserve", 0.3)
    assert worker.knob("reserve") == 0.5
    worker.close()


def test_a_note_is_read_as_written_until_it_is_cleared(table: WorkerTable) -> None:
    worker = WorkerTable.open(table.reference, "pool", SloSection())
    assert table.note == ""
    worker.note = "collection 'docs' is not served:\n  codes.npy ends early – 3 of 4 bytes"
    assert table.note == "collection 'docs' is not served: codes.npy ends early – 3 of 4 bytes"
    worker.note = "short"
    assert table.note == "short"
    worker.note = ""
    assert table.note == ""
    worker.close()


def test_a_new_process_is_never_observed_with_the_previous_state(
    table: WorkerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.begin(1, 100)
    table.state = State.READY
    seen: list[tuple[int, State]] = []
    look = property(lambda one: "", lambda one, text: seen.append((one.epoch, one.state)))
    monkeypatch.setattr(WorkerTable, "note", look)  # is written in between, as a supervisor may look then
    table.begin(2, 101)
    assert seen
    assert (2, State.READY) not in seen
