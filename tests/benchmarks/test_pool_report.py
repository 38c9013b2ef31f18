"""Tests of the report of the pool's benchmark, with and without measurements."""

from benchmarks.pool.bench import bars, markdown, overall

MIXED = {"static_small_p99_us": 300.0, "trinity_small_p99_us": 100.0, "lost_percent": 0.05, "measured_again": 2.0}
LATE = MIXED | {"trinity_small_p99_us": 150.0}
REPORT = {
    "data": "vectors", "machine": {"processor": "P", "cores": 2, "system": "S", "python": "3.11"}, "versions": {},
    "settings": {"seed": 0, "rounds": 3, "seconds": 3.0, "quick": False}, "took_s": 60.0,
}  # fmt: skip


def report(*rounds: dict[str, float]) -> str:
    measured = [found | {"load_average": 0.5} for found in rounds]
    return markdown(REPORT | {"rounds": measured, "overall": overall(measured)})


def test_a_ratio_is_reported_with_its_bar_and_each_rounds_value() -> None:
    assert "| small p99, static / ours | ≥ 3 | 3.00 | 3.00, 2.00, 3.00 |" in report(MIXED, LATE, MIXED)
    assert "| small p99, static / ours | ≥ 3 | 2.00 (missed) | 3.00, 2.00, 2.00 |" in report(MIXED, LATE, LATE)


def test_missing_measurements_have_no_line() -> None:
    text = report(MIXED)
    assert [bar.figure for bar in bars(quick=False) if bar.figure in text] == ["small p99, static / ours"]
