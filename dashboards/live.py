"""A node's /metrics as it changes: values, rates and quantiles over the last half minute, without a Prometheus."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from runtime.node.figures import Named

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Snapshot:
    """All samples at a moment (seconds of any steady clock): name → (labels, value)."""

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    @classmethod
    def parse(cls, at_s: float, text: str) -> "Snapshot":
        """From Prometheus's text format. Raises `ValueError` for what is none."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at_s, samples)

    def select(self, name: str | Named, labels: Labels) -> Iterator[tuple[Labels, float]]:
        for found, value in self.samples.get(str(name), ()):
            if labels.items() <= found.items():
                yield found, value


class Live:
    """The latest snapshots, up to `span_s` seconds of them. What cannot be said yet, or has no data, is None."""

    def __init__(self, span_s: float = 30.0) -> None:
        self._span_s = span_s
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and self._snapshots[1].at_s <= snapshot.at_s - self._span_s:
            self._snapshots.popleft()

    @property
    def now(self) -> Snapshot:
        """The last one; there must be one."""
        return self._snapshots[-1]

    def value(self, name: str | Named, **labels: str) -> float | None:
        """The sum of a gauge's (or counter's) series."""
        found = [value for _, value in self.now.select(name, labels)]
        return sum(found) if found else None

    def highest(self, name: str | Named, **labels: str) -> float | None:
        """The largest of its series."""
        return max((value for _, value in self.now.select(name, labels)), default=None)

    def increase(self, name: str | Named, **labels: str) -> float | None:
        """By how much a counter has grown; one that fell began anew."""
        if len(self._snapshots) < 2:
            return None
        found = [
            (sum(now for found, now in last.select(name, labels)), sum(was for _, was in first.select(name, labels)))
            for first, last in zip(self._snapshots, list(self._snapshots)[1:], strict=False)
            if any(True for _ in last.select(name, labels))
        ]
        return sum(now - was if now >= was else now for now, was in found) if found else None

    def rate(self, name: str | Named, **labels: str) -> float | None:
        """Its growth a second."""
        passed_s = self.now.at_s - self._snapshots[0].at_s
        grown = self.increase(name, **labels)
        return None if grown is None or passed_s <= 0 else grown / passed_s

    def ratio(self, part: str | Named, whole: str | Named, **labels: str) -> float | None:
        """One counter's growth by another's."""
        over, under = self.increase(part, **labels), self.increase(whole, **labels)
        return None if over is None or not under else over / under

    def mean(self, histogram: str | Named, **labels: str) -> float | None:
        """The mean of what was observed."""
        return self.ratio(f"{histogram}_sum", f"{histogram}_count", **labels)

    def quantile(self, q: float, histogram: str | Named, **labels: str) -> float | None:
        """As Prometheus's histogram_quantile: linear within the bucket, the last edge for what lies beyond it."""
        name = f"{histogram}_bucket"
        edges = sorted({found["le"] for found, _ in self.now.select(name, labels)}, key=float)
        counts = [self.increase(name, le=edge, **labels) or 0.0 for edge in edges]
        if not counts or not counts[-1]:
            return None
        rank, below, lower = q * counts[-1], 0.0, 0.0
        for edge, count in zip(map(float, edges), counts, strict=True):
            if count >= rank:
                return lower if math.isinf(edge) else lower + (edge - lower) * (rank - below) / (count - below)
            below, lower = count, edge
        return lower
