"""State transitions of a `SlotTable`, compiled.

They update its record and `active`, int32 [slots], whose first entries are the running slots in admission order.
The lowest free slot is assigned first, which keeps active slots close together.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.engine import PAUSE, RESUME
from gpu.slots import SlotState, SlotStates

_FREE, _ACTIVE, _PAUSED, _FINISHED = (int(state) for state in SlotState)


@compiled
def next_free(table: SlotStates) -> Any:
    """Return the lowest free slot. Precondition: a slot is free."""
    slot = table.lowest
    while table.states[slot] != _FREE:
        slot += 1
    return slot


@compiled
def acquire(table: SlotStates, active: npt.NDArray[np.int32], slot: int) -> None:
    """Mark `slot`, the result of `next_free`, as running."""
    table.lowest = slot + 1
    table.free_count -= 1
    _activate(table, active, slot)


@compiled
def finish(table: SlotStates, slot: int) -> None:
    """Mark a slot as finished. The caller removes it from `active`."""
    table.states[slot] = _FINISHED


@compiled
def change(table: SlotStates, active: npt.NDArray[np.int32], slot: int, action: int) -> None:
    """PAUSE, RESUME or RELEASE a slot. Precondition: the transition is valid."""
    if action == RESUME:
        _activate(table, active, slot)
        return
    if table.states[slot] == _ACTIVE:
        _deactivate(table, active, slot)
    table.states[slot] = _PAUSED
    if action != PAUSE:
        table.states[slot] = _FREE
        table.free_count += 1
        table.lowest = min(table.lowest, slot)


@compiled
def _deactivate(table: SlotStates, active: npt.NDArray[np.int32], slot: int) -> None:
    position = 0
    while active[position] != slot:
        position += 1
    table.active_count -= 1
    for i in range(position, table.active_count):
        active[i] = active[i + 1]


@compiled
def _activate(table: SlotStates, active: npt.NDArray[np.int32], slot: int) -> None:
    active[table.active_count] = slot
    table.active_count += 1
    table.states[slot] = _ACTIVE
