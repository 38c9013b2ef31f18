"""What a caller asks of a search, checked where it enters, before any pool is known; a pool has limits of its own."""

import numbers
import operator
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ipc import STAGES, SearchSpec
from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.filters import Wanted, filter_bytes

_MOST = 65_535  # of k, top_m, search_width and patience: what a request's header holds
_LATEST_NS = (1 << 63) - 1
_LONGEST_MS = 86_400_000  # a deadline further away than a day is a mistake


def spec_of(
    k: Any,
    collection: Any,
    stage: Any,
    top_m: Any,
    search_width: Any,
    patience: Any,
    deadline_ns: Any = 0,
    wanted: Wanted = None,
) -> SearchSpec:
    """Checked, integers of any kind as Python's own. Raises `InvalidRequest` that names the value and its limit."""
    k = _integer("k", k, 1, _MOST)
    if top_m is not None:
        top_m = _integer("top_m", top_m, 1, _MOST)
        if k > top_m:
            raise InvalidRequest(f"k is {k}, more than top_m, which is {top_m}: no more than those are kept", "k")
    if type(collection) is not str:
        raise InvalidRequest(f"collection must be a name, not {collection!r}", "collection")
    if stage not in STAGES:
        raise InvalidRequest(f"stage must be one of {STAGES}, not {stage!r}", "stage")
    return SearchSpec(
        collection,
        k,
        stage,
        top_m,
        _integer("search_width", search_width, 1, _MOST),
        None if patience is None else _integer("patience", patience, 1, _MOST),
        deadline_at(deadline_ns),
        filter_bytes(wanted),
    )


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise InvalidRequest(f"{name} must be an integer, not {value!r}", name) from None
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}, outside {least}..{most}", name)
    return int(value)  # not of a subclass


def deadline_at(deadline_ns: Any) -> int:
    """A deadline on the monotonic clock, checked. Raises `InvalidRequest`."""
    return _integer("deadline_ns", deadline_ns, 0, _LATEST_NS)


def deadline_of(deadline_ms: Any) -> int:
    """`deadline_ms` from now on, on the monotonic clock in ns; 0 for none. Raises `InvalidRequest`."""
    if deadline_ms is None:
        return 0
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, numbers.Real):
        raise InvalidRequest(f"deadline_ms must be a number, not {deadline_ms!r}", "deadline_ms")
    number: Any = deadline_ms
    if not 0 < number <= _LONGEST_MS:
        raise InvalidRequest(f"deadline_ms is {deadline_ms}, outside 0..{_LONGEST_MS}", "deadline_ms")
    return time.monotonic_ns() + int(float(number) * 1e6)


def check_finite(vector: npt.NDArray[np.float32]) -> None:
    """Raises `InvalidRequest` that names the first value of `vector` [d] that is none."""
    finite = np.isfinite(vector)
    if not finite.all():
        place = int(np.argmin(finite))
        raise InvalidRequest(f"vector[{place}] is {vector[place]}: not finite", "vector")
