"""Rates, ratios and quantiles from two scrapes of /metrics, as Prometheus computes them."""

import pytest

from dashboards import terminal_overview
from dashboards.terminal_overview import MetricWindow, Snapshot

HISTOGRAM = """# TYPE wait_seconds histogram
wait_seconds_bucket{{le="0.1"}} {0}
wait_seconds_bucket{{le="0.2"}} {1}
wait_seconds_bucket{{le="+Inf"}} {2}
wait_seconds_sum {3}
wait_seconds_count {2}
"""


def live(*texts: str, every_s: float = 2.0, span_s: float = 30.0) -> MetricWindow:
    made = MetricWindow(span_s)
    for number, text in enumerate(texts):
        made.add(Snapshot.parse(number * every_s, text))
    return made


def counter(*values: float) -> list[str]:
    return [f'# TYPE x counter\nx_total{{worker="a"}} {value}\nx_total{{worker="b"}} {value}\n' for value in values]


def test_a_rate_is_the_increase_of_all_series_over_the_elapsed_time() -> None:
    assert live(*counter(0, 10)).rate("x_total") == 10.0
    assert live(*counter(0, 10)).rate("x_total", worker="a") == 5.0


def test_one_scrape_gives_values_but_no_rates_and_missing_series_are_none() -> None:
    one = live(*counter(5))
    assert one.value("x_total") == 10.0
    assert one.rate("x_total") is None
    assert live(*counter(0, 1)).rate("y_total") is None


def test_a_decreased_counter_is_a_reset_and_no_rate_is_negative() -> None:
    assert live(*counter(100, 110, 3)).increase("x_total", worker="a") == 13.0


def test_only_the_latest_window_counts() -> None:
    fast_then_still = counter(0, 100, 200, 200, 200)
    assert live(*fast_then_still, every_s=10, span_s=20).rate("x_total") == 0.0


def test_a_quantile_is_interpolated_within_its_bucket_over_new_observations() -> None:
    two = live(HISTOGRAM.format(50, 50, 50, 1.0), HISTOGRAM.format(50, 60, 60, 2.5))
    assert two.quantile(0.5, "wait_seconds") == pytest.approx(0.15)
    assert two.mean("wait_seconds") == pytest.approx(0.15)


def test_a_quantile_is_capped_at_the_last_edge_and_none_without_observations() -> None:
    assert live(HISTOGRAM.format(0, 0, 0, 0), HISTOGRAM.format(0, 0, 9, 9)).quantile(0.5, "wait_seconds") == 0.2
    assert live(HISTOGRAM.format(1, 1, 1, 0), HISTOGRAM.format(1, 1, 1, 0)).quantile(0.5, "wait_seconds") is None


def test_values_are_shown_in_a_fitting_unit() -> None:
    assert [terminal_overview.seconds(value) for value in (None, 0.0, 50e-6, 0.0123, 2.5)] == [
        "–",
        "0 s",
        "50 µs",
        "12.3 ms",
        "2.5 s",
    ]
    assert [terminal_overview.size(value) for value in (None, 1 << 20, 3 << 30)] == ["–", "1 MiB", "3.0 GiB"]
