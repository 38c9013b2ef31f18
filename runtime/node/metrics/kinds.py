"""Kinds of metrics in workers' tables."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_args

from runtime.node.config import SloSection
from runtime.node.supervisor_metrics import NamedMetric


@dataclass(frozen=True, eq=False)
class Counter(NamedMetric):
    """A value that only grows, also across restarts of the worker."""

    name: str
    help: str
    label: tuple[str, str] | None = None
    kind: ClassVar[str] = "counter"


@dataclass(frozen=True, eq=False)
class Gauge(NamedMetric):
    """A value that starts at 0 in every process."""

    name: str
    help: str
    label: tuple[str, str] | None = None
    kind: ClassVar[str] = "gauge"


@dataclass(frozen=True, eq=False)
class Histogram(NamedMetric):
    """Counts by bucket, and the sum. A `limit` of the configuration becomes a bucket edge, so that SLOs can be computed
    from buckets."""

    name: str
    help: str
    buckets: tuple[float, ...]
    label: tuple[str, str] | None = None
    limit: Callable[[SloSection], float] | None = None
    kind: ClassVar[str] = "histogram"

    def edges(self, slo: SloSection) -> tuple[float, ...]:
        """Return the upper edges of all buckets but the last, which has none."""
        return tuple(sorted({*self.buckets, self.limit(slo)})) if self.limit else self.buckets


Metric = Counter | Gauge | Histogram
Value = TypeVar("Value", bound=str)
Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class ByLabel(NamedMetric, dict[Value, Kind]):
    """Metrics of one name by the value of a label; `values` is a `Literal` type."""

    def __init__(self, kind: Callable[..., Kind], name: str, help: str, label: str, values: Any, *more: Any) -> None:
        super().__init__({value: kind(name, help, *more, label=(label, value)) for value in get_args(values)})
        self.name = name
