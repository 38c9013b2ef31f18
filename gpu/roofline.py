"""Roofline of the search: bandwidth utilisation of an extend by number of active slots, against a memory copy.

Utilisation is the bytes that an extend reads per second, over the bandwidth of a copy in the same run. It grows with
the active slots X until the device is saturated:

    u(X) = min(u_max, (X / X_sat)^α)

X_sat is where the power law reaches 1. α = 1 means that, up to saturation, the time of an extend does not depend on
the number of slots; α = 0 that it is proportional to it. u can exceed 1 for an index that fits into the caches. The
same law models prefill (X tokens a pass) and decode (X rows a step), relative to the best rate measured of each.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu.engine import Engine
from gpu.errors import InvalidParams
from gpu.index.graph_index import GraphIndex
from gpu.params import SearchParams

ACTIVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_REPEAT = 3
_EXTENDS = 64  # minimum of timed extends per count of active slots: few active slots need several queries
_COPY_BYTES = 256 << 20

Clock = Callable[[], float]
Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Saturation:
    """A saturation curve, u(X) = min(u_max, (X / x_sat)^alpha), with positive parameters."""

    u_max: float
    x_sat: float
    alpha: float

    def at(self, x: float) -> float:
        """Return the utilisation at a load x > 0."""
        return min(self.u_max, float((x / self.x_sat) ** self.alpha))

    @classmethod
    def fit(cls, x: Sequence[float], u: Sequence[float]) -> "Saturation":
        """Fit the curve to points (x, u), all above 0, by least squares of logarithms.

        Tries every split into growing and saturated points. Raises InvalidParams for fewer than two different x, or
        values that are not positive and finite.
        """
        loads, found = np.asarray(x, np.float64), np.asarray(u, np.float64)
        if loads.ndim != 1 or loads.shape != found.shape or len(np.unique(loads)) < 2:
            raise InvalidParams(f"a fit needs at least 2 different loads, each with a utilisation; got {list(x)}")
        if not (np.all(np.isfinite(loads) & (loads > 0)) and np.all(np.isfinite(found) & (found > 0))):
            raise InvalidParams(f"loads {list(x)} and utilisations {list(u)} must all be above 0 and finite")
        order = np.argsort(loads, kind="stable")
        log_x, log_u = np.log(loads[order]), np.log(found[order])
        candidates = [_curve(log_x, log_u, growing) for growing in range(1, len(log_x) + 1)]
        errors = [float(np.sum(np.square(_log_at(curve, log_x) - log_u))) for curve in candidates]
        u_max, log_sat, alpha = candidates[int(np.argmin(errors))]
        return cls(float(np.exp(u_max)), float(np.exp(log_sat)), float(alpha))


_LEAST_ALPHA = 0.02  # below that u does not grow, and x_sat would overflow
_LogCurve = tuple[float, float, float]


def _curve(log_x: npt.NDArray[np.float64], log_u: npt.NDArray[np.float64], growing: int) -> _LogCurve:
    """Return log u_max, log x_sat and α, with the first `growing` points on the power law and the others saturated."""
    head_x, head_u = log_x[:growing], log_u[:growing]
    if head_x[0] < head_x[-1]:
        alpha, intercept = np.polyfit(head_x, head_u, 1)
        alpha = max(float(alpha), _LEAST_ALPHA)
    else:
        alpha = 1.0
    intercept = float(np.mean(head_u - alpha * head_x))
    # If all points grow, the ceiling is unknown: at least the law's value at the last point.
    top = float(np.mean(log_u[growing:])) if growing < len(log_u) else intercept + alpha * float(log_x[-1])
    return top, min(max(-intercept / alpha, -700.0), 700.0), alpha


def _log_at(curve: _LogCurve, log_x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    top, log_sat, alpha = curve
    return np.minimum(top, alpha * (log_x - log_sat))


@dataclass(frozen=True)
class ExtendTime:
    """Time of an extend of `active` slots over vectors of `dim`: the minimum of several (s), and the bytes read."""

    dim: int
    active: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class SearchRoofline:
    """Measured extend times of one device, and the curve fitted to them.

    peak_bytes_s: read bandwidth of a copy, bytes/s. slot_bytes: bytes that an extend reads per slot.
    """

    device: str
    peak_bytes_s: float
    slot_bytes: float
    saturation: Saturation
    measured: tuple[ExtendTime, ...]

    def extend_seconds(self, active: float) -> float:
        """Return the seconds of an extend of `active` slots, at least 1, by the fitted curve."""
        return active * self.slot_bytes / (self.peak_bytes_s * self.saturation.at(active))


def slot_bytes(index: GraphIndex, search_width: int) -> int:
    """Return the bytes that an extend reads per slot: `search_width` graph rows, and the vector of each of their edges.

    This is an upper bound: visited vectors are skipped. Values are comparable for one index, not between indexes.
    """
    return search_width * index.degree * (4 + int(index.data.rows.codes.strides[0]))


def measure_extends(
    engine: Engine, collection: str, index: GraphIndex, params: SearchParams, clock: Clock = time.perf_counter
) -> list[ExtendTime]:
    """Time extends of 1, 2, 4, … up to all free slots of an engine that has loaded `index` as `collection`."""
    _touch(index)
    slots = engine.free_slots
    queries = typical_queries(index, 4 * slots + 64)  # distinct ones: vectors just read are cached
    counts = [count for count in ACTIVE if count < slots] + [slots]
    each = slot_bytes(index, params.search_width)
    query_cycle = itertools.cycle(queries)
    taken = []
    for count in counts:
        found = min(_extend_s(engine, collection, query_cycle, params, count, clock) for _ in range(_REPEAT))
        if found:  # 0: the index is so small that queries finish in one extend
            taken.append(ExtendTime(index.dim, count, found, count * each))
    return taken


def _extend_s(
    engine: Engine, collection: str, queries: Iterator[Vector], params: SearchParams, count: int, clock: Clock
) -> float:
    """Return the mean time of extends of `count` slots, in seconds; 0 if none advanced all of them."""
    spent, extends = 0.0, 0
    for _ in range(_EXTENDS):
        held = [engine.admit(next(queries), params, collection) for _ in range(count)]
        engine.extend()  # untimed: the first one scores the seeds
        begin, before = clock(), extends
        while engine.active_slots == count:
            engine.extend()
            extends += 1
        spent += clock() - begin
        for slot in held:
            engine.release(slot)
        if extends == before or extends >= _EXTENDS:
            break
    return spent / extends if extends else 0.0


def typical_queries(index: GraphIndex, count: int) -> npt.NDArray[np.float32]:
    """Return realistic queries, float32 [count, dim]: stored vectors with noise of half their spread.

    Random queries, far from all vectors, make a search read several times as much.
    """
    random = np.random.default_rng(0)
    rows = index.data.rows
    near = np.asarray(rows.codes[random.integers(len(rows.codes), size=count)], np.float32)[:, : index.dim]
    noise = random.standard_normal(near.shape, np.float32) * near.std(axis=0)
    queries: npt.NDArray[np.float32] = near + np.float32(0.5) * noise
    return queries


def _touch(index: GraphIndex) -> None:
    """Read a byte of every page, so that page faults of mapped files are not timed."""
    for array in (index.data.rows.codes, index.data.graph):
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::4096].max()


def host_copy_bytes_s(clock: Clock = time.perf_counter, nbytes: int = _COPY_BYTES) -> float:
    """Return the read bandwidth of one core copying memory, bytes/s: the fastest of several copies."""
    source, target = np.ones(nbytes // 8), np.empty(nbytes // 8)
    target[:] = source
    times = []
    for _ in range(_REPEAT):
        begin = clock()
        target[:] = source
        times.append(clock() - begin)
    return source.nbytes / max(min(times), 1e-12)


def search_roofline(device: str, peak_bytes_s: float, measured: Sequence[ExtendTime]) -> SearchRoofline:
    """Fit the curve to extends of one index. Raises InvalidParams for fewer than two counts of active slots."""
    loads = [float(one.active) for one in measured]
    used = [one.nbytes / one.seconds / peak_bytes_s for one in measured]
    saturation = Saturation.fit(loads, used)
    each = measured[0].nbytes / measured[0].active
    return SearchRoofline(device, peak_bytes_s, each, saturation, tuple(measured))
