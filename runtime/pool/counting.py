"""The loop's metrics, written by compiled code where the worker's table has them."""

from typing import Any

from ipc.memory.instructions import floats
from runtime.pool.compiled import compiled


@compiled
def count(loop: Any, counter: int, amount: float) -> None:
    """Add to the counter of this word of the loop."""
    floats(loop[counter], 1)[0] += amount


@compiled
def observe(loop: Any, histogram: int, value: float) -> None:
    """A value of the histogram of this word and the two behind it."""
    many = loop[histogram + 2]
    edges, buckets = floats(loop[histogram + 1], many), floats(loop[histogram], many + 2)
    place = 0
    while place < many and edges[place] < value:
        place += 1
    buckets[place] += 1.0
    buckets[many + 1] += value
