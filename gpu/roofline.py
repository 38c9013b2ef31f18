"""How much of a device a search uses: extends measured by active slots, beside a plain copy of memory.

Utilisation is what an extend reads, over its time, over the bandwidth of a copy in the same run. It grows with the
active slots X until the device is saturated:

    u(X) = min(u_max, (X / X_sat)^α)

X_sat is where the power law would reach 1; α = 1 means that an extend takes the same time however many slots it
advances (so far), α = 0 that each slot adds its full price. An index that fits into caches can go beyond u = 1. The
same law serves prefill (X tokens a pass) and decode (X rows a step), against the best rate that was measured of each.
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
_EXTENDS = 64  # timed for each count of active slots, at least: many queries where few are active
_COPY_BYTES = 256 << 20

Clock = Callable[[], float]
Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Saturation:
    """u(X) = min(u_max, (X / x_sat)^alpha), all three above 0."""

    u_max: float
    x_sat: float
    alpha: float

    def at(self, x: float) -> float:
        """The utilisation at a load of x > 0."""
        return min(self.u_max, float((x / self.x_sat) ** self.alpha))

    @classmethod
    def fit(cls, x: Sequence[float], u: Sequence[float]) -> "Saturation":
        """The curve nearest to points (x, u), all above 0, in squared logarithms.

        Every split into points that still grow and points that are saturated is tried. Raises InvalidParams for fewer
        than two different x, or values that are not positive and finite.
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


_LEAST_ALPHA = 0.02  # less is no growth, and x_sat would leave the range of numbers
_LogCurve = tuple[float, float, float]


def _curve(log_x: npt.NDArray[np.float64], log_u: npt.NDArray[np.float64], growing: int) -> _LogCurve:
    """log u_max, log x_sat and α, if the first `growing` points are on the power law and the others saturated."""
    head_x, head_u = log_x[:growing], log_u[:growing]
    if head_x[0] < head_x[-1]:
        alpha, intercept = np.polyfit(head_x, head_u, 1)
        alpha = max(float(alpha), _LEAST_ALPHA)
    else:
        alpha = 1.0
    intercept = float(np.mean(head_u - alpha * head_x))
    # Where all points grow the ceiling was not seen: it is at least what the law gives for the last of them.
    top = float(np.mean(log_u[growing:])) if growing < len(log_u) else intercept + alpha * float(log_x[-1])
    return top, min(max(-intercept / alpha, -700.0), 700.0), alpha


def _log_at(curve: _LogCurve, log_x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    top, log_sat, alpha = curve
    return np.minimum(top, alpha * (log_x - log_sat))


@dataclass(frozen=True)
class ExtendTime:
    """An extend of `active` slots over vectors of `dim`: the fastest of some (s), and the bytes it asked for."""

    dim: int
    active: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class SearchRoofline:
    """What was measured of search on one device, and the curve through it.

    peak_bytes_s: bytes read a second by a plain copy. slot_bytes: bytes that an extend reads for one slot.
    """

    device: str
    peak_bytes_s: float
    slot_bytes: float
    saturation: Saturation
    measured: tuple[ExtendTime, ...]

    def extend_seconds(self, active: float) -> float:
        """One extend of `active` slots, at least 1, by the fitted curve."""
        return active * self.slot_bytes / (self.peak_bytes_s * self.saturation.at(active))


def slot_bytes(index: GraphIndex, search_width: int) -> int:
    """Bytes that an extend asks for a slot: `search_width` graph rows, and the vector of every edge in them.

    Vectors met before are skipped, and a sketch can spare the vector behind it, so less may be read: compare one index
    with itself, not with another.
    """
    return search_width * index.degree * (4 + int(index.data.rows.codes.strides[0]))


def measure_extends(
    engine: Engine, collection: str, index: GraphIndex, params: SearchParams, clock: Clock = time.perf_counter
) -> list[ExtendTime]:
    """Time extends of 1, 2, 4, … up to all free slots of an engine that holds `index` as `collection`."""
    _touch(index)
    slots = engine.free_slots
    queries = typical_queries(index, 4 * slots + 64)  # others each time: vectors that were just read are cached
    counts = [count for count in ACTIVE if count < slots] + [slots]
    each = slot_bytes(index, params.search_width)
    asked = itertools.cycle(queries)
    taken = []
    for count in counts:
        found = min(_extend_s(engine, collection, asked, params, count, clock) for _ in range(_REPEAT))
        if found:  # else the index is so small that its first extend was the last
            taken.append(ExtendTime(index.dim, count, found, count * each))
    return taken


def _extend_s(
    engine: Engine, collection: str, queries: Iterator[Vector], params: SearchParams, count: int, clock: Clock
) -> float:
    """The mean of some extends of `count` slots, in seconds; 0 if none advanced all of them."""
    spent, extends = 0.0, 0
    for _ in range(_EXTENDS):
        held = [engine.admit(next(queries), params, collection) for _ in range(count)]
        engine.extend()  # the first one takes up the seeds
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
    """Queries float32 [count, dim] such as are asked: near stored vectors, with noise of half their spread.

    Far from all of them, every neighbour is as good as another, and a search reads several times as much.
    """
    random = np.random.default_rng(0)
    rows = index.data.rows
    stored = rows.codes if rows.full is None else rows.full
    near = np.asarray(stored[random.integers(len(stored), size=count)], np.float32)[:, : index.dim]
    noise = random.standard_normal(near.shape, np.float32) * near.std(axis=0)
    queries: npt.NDArray[np.float32] = near + np.float32(0.5) * noise
    return queries


def _touch(index: GraphIndex) -> None:
    """Read a byte of every page: the first touch of a mapped file costs more than a distance."""
    rows = index.data.rows
    sketches = None if rows.sketch is None else rows.sketch.codes
    for array in (rows.codes, rows.full, sketches, index.data.graph):
        if array is not None:
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::4096].max()


def host_copy_bytes_s(clock: Clock = time.perf_counter, nbytes: int = _COPY_BYTES) -> float:
    """Bytes read a second while one core copies memory: the fastest of some copies."""
    source, target = np.ones(nbytes // 8), np.empty(nbytes // 8)
    target[:] = source
    times = []
    for _ in range(_REPEAT):
        begin = clock()
        target[:] = source
        times.append(clock() - begin)
    return source.nbytes / max(min(times), 1e-12)


def search_roofline(device: str, peak_bytes_s: float, measured: Sequence[ExtendTime]) -> SearchRoofline:
    """Fit the extends of one index. Raises InvalidParams for fewer than two counts of active slots."""
    loads = [float(one.active) for one in measured]
    used = [one.nbytes / one.seconds / peak_bytes_s for one in measured]
    saturation = Saturation.fit(loads, used)
    each = measured[0].nbytes / measured[0].active
    return SearchRoofline(device, peak_bytes_s, each, saturation, tuple(measured))
