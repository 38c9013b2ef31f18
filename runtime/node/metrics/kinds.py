"""Kinds of metrics in workers' tables."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Self, TypeVar, get_args

from runtime.node.config import SloSection
from runtime.node.supervisor_metrics import NamedMetric

Value = TypeVar("Value", bound=str)


class Label(Generic[Value]):
    """A label and its values, those of a `Literal` type."""

    def __init__(self, name: str, values: Any) -> None:
        self.name = name
        self.values: tuple[Value, ...] = get_args(values)


@dataclass(frozen=True, eq=False)
class Metric(NamedMetric):
    """A metric in Prometheus, or that part of one whose `label` has a value."""

    name: str
    help: str
    _: KW_ONLY
    label: tuple[str, str] | None = None

    @classmethod
    def by(cls, name: str, help: str, label: Label[Value], *more: Any) -> "ByLabel[Value, Self]":
        """Return metrics of one name by the value of a label. `more`: further arguments of each."""
        return ByLabel(name, {value: cls(name, help, *more, label=(label.name, value)) for value in label.values})


Kind = TypeVar("Kind", bound=Metric)


class ByLabel(NamedMetric, dict[Value, Kind]):
    """Metrics of one name by the value of a label."""

    def __init__(self, name: str, metrics: dict[Value, Kind]) -> None:
        super().__init__(metrics)
        self.name = name


class Counter(Metric):
    """A value that only grows, also across restarts of the worker."""


class Gauge(Metric):
    """A value that starts at 0 in every process."""


@dataclass(frozen=True, eq=False)
class Histogram(Metric):
    """Counts by bucket, and the sum. A `limit` of the configuration becomes a bucket edge, so that SLOs can be computed
    from buckets."""

    buckets: tuple[float, ...]
    _: KW_ONLY
    limit: Callable[[SloSection], float] | None = None

    def edges(self, slo: SloSection) -> tuple[float, ...]:
        """Return the upper edges of all buckets but the last, which has none."""
        return tuple(sorted({*self.buckets, self.limit(slo)})) if self.limit else self.buckets
