"""How compiled code changes a `SlotTable`: its words, and `active`, int32 [slots], which begins with the running slots,
oldest first. The lowest free slot is taken next, so that few slots lie close together."""

from typing import Any

from gpu.compiled import compiled
from gpu.engine import PAUSE, RESUME
from gpu.slots import ACTIVE_COUNT, FREE_COUNT, LOWEST, STATES, SlotState

_FREE, _ACTIVE, _PAUSED, _FINISHED = (int(state) for state in SlotState)


@compiled
def next_free(words: Any) -> Any:
    """The slot to be taken next. There must be one."""
    slot = words[LOWEST]
    while words[STATES + slot] != _FREE:
        slot += 1
    return slot


@compiled
def acquire(words: Any, active: Any, slot: int) -> None:
    """Make `next_free` a running slot."""
    words[LOWEST] = slot + 1
    words[FREE_COUNT] -= 1
    _activate(words, active, slot)


@compiled
def finish(words: Any, slot: int) -> None:
    """A slot is done, and taken out of `active`."""
    words[STATES + slot] = _FINISHED


@compiled
def change(words: Any, active: Any, slot: int, action: int) -> None:
    """PAUSE, RESUME or RELEASE a slot that may be."""
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
def _deactivate(words: Any, active: Any, slot: int) -> None:
    place = 0
    while active[place] != slot:
        place += 1
    words[ACTIVE_COUNT] -= 1
    for i in range(place, words[ACTIVE_COUNT]):
        active[i] = active[i + 1]


@compiled
def _activate(words: Any, active: Any, slot: int) -> None:
    active[words[ACTIVE_COUNT]] = slot
    words[ACTIVE_COUNT] += 1
    words[STATES + slot] = _ACTIVE
