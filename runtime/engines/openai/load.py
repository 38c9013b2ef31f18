"""How busy a server says that it is: vLLM's gauges, which others export too (llm-d asks for the same names)."""

import re
from dataclasses import dataclass

_GAUGE = re.compile(r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)", re.M)


@dataclass(frozen=True, slots=True)
class Load:
    """`kv_usage`: the share of its KV that is in use, 0..1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0

    @property
    def requests(self) -> int:
        """Requests that it has."""
        return self.running + self.waiting


def read_load(metrics: str) -> Load | None:
    """From metrics in Prometheus's text format; of several engines behind a server the sum, and the fullest KV. None
    if they do not tell."""
    found: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(metrics):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            return None
    counts = [found.get(name) for name in ("num_requests_running", "num_requests_waiting")]
    if None in counts:
        return None
    running, waiting = (int(sum(count or ())) for count in counts)
    return Load(running, waiting, max(found.get("kv_cache_usage_perc", [0.0])))
