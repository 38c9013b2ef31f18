"""State transitions of a `SlotTable`, compiled.

They update the table's words and `active`, int32 [slots], whose first entries are the running slots in admission order.
The lowest free slot is assigned first, which keeps active slots close together.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.engine import PAUSE, RESUME
from gpu.slots import ACTIVE_COUNT, FREE_COUNT, LOWEST, STATES, SlotState

_FREE, _ACTIVE, _PAUSED, _FINISHED = (int(state) for state in SlotState)


@compiled
def next_free(words: npt.NDArray[np.int64]) -> Any:
    """Return the lowest free slot. Precondition: a slot is free."""
    slot = words[LOWEST]
    while words[STATES + slot] != _FREE:
        slot += 1
    return slot


@compiled
def acquire(words: npt.NDArray[np.int64], active: npt.NDArray[np.int32], slot: int) -> None:
    """Mark `slot`, the result of `next_free`, as running."""
    words[LOWEST] = slot + 1
    words[FREE_COUNT] -= 1
    _activate(words, active, slot)


@compiled
def finish(words: npt.NDArray[np.int64], slot: int) -> None:
    """Mark a slot as finished. The caller removes it from `active`."""
    words[STATES + slot] = _FINISHED


@compiled
def change(words: npt.NDArray[np.int64], active: npt.NDArray[np.int32], slot: int, action: int) -> None:
    """PAUSE, RESUME or RELEASE a slot. Precondition: the transition is valid."""
    if action == RESUME:
        _activate(words, active, slot)
        return
    if words[STATES + slot] == _ACTIVE:
        _deactivate(words, active, slot)
    words[STATES + slot] = _PAUSED
    if action != PAUSE:
        words[STATES + slot] = _FREE
        words[FREE_COUNT] += 1
        words[LOWEST] = min(words[LOWEST], slot)


@compiled
def _deactivate(words: npt.NDArray[np.int64], active: npt.NDArray[np.int32], slot: int) -> None:
    position = 0
    while active[position] != slot:
        position += 1
    words[ACTIVE_COUNT] -= 1
    for i in range(position, words[ACTIVE_COUNT]):
        active[i] = active[i + 1]


@compiled
def _activate(words: npt.NDArray[np.int64], active: npt.NDArray[np.int32], slot: int) -> None:
    active[words[ACTIVE_COUNT]] = slot
    words[ACTIVE_COUNT] += 1
    words[STATES + slot] = _ACTIVE
