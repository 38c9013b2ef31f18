"""A server's load, from vLLM's gauges; other servers export them too (llm-d reads the same names).

The use of the KV link comes from the sums of the histograms in which vLLM's NIXL and Mooncake connectors observe each
transfer's duration.
"""

import re
from dataclasses import dataclass
from math import isfinite

_METRIC = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|(?:nixl|mooncake)_xfer_time_seconds_sum)"
    r"(?:\{[^}]*\})? (\S+)",
    re.M,
)
_LINK = "_xfer_time_seconds_sum"


@dataclass(frozen=True, slots=True)
class Load:
    """Reported load of a server. `kv_usage`: share of its KV cache in use, 0..1; `link_busy_s`: duration of all of its
    KV transfers, summed over tensor-parallel ranks, 0 if it reports none."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    link_busy_s: float = 0.0

    @property
    def requests(self) -> int:
        """Running and waiting requests."""
        return self.running + self.waiting


def parse_load(metrics: str) -> Load | None:
    """Parse metrics in Prometheus's text format; None if they lack the gauges, or one is not a finite number.

    Of several engines behind one server, requests are summed and the fullest KV cache counts.
    """
    samples: dict[str, list[float]] = {}
    for name, value in _METRIC.findall(metrics):
        try:
            number = float(value)
        except ValueError:
            return None
        if not isfinite(number):
            return None
        samples.setdefault(name, []).append(number)
    counts = [samples.get(name) for name in ("num_requests_running", "num_requests_waiting")]
    if None in counts:
        return None
    running, waiting = (int(sum(count or ())) for count in counts)
    link_busy_s = sum(sum(values) for name, values in samples.items() if name.endswith(_LINK))
    return Load(running, waiting, max(samples.get("kv_cache_usage_perc", [0.0])), link_busy_s)
