"""Where entries stand: free, in Q_pre or Q_dec (heaps by START_BY, and of equal ones by SERIAL), or in the list of who
is active or paused. Compiled."""

from typing import Any

from runtime.pool import tables as at
from runtime.pool.compiled import compiled


@compiled
def before(entries: Any, a: int, b: int) -> Any:
    """Whether entry `a` goes before `b`."""
    if entries[a, at.START_BY] != entries[b, at.START_BY]:
        return entries[a, at.START_BY] < entries[b, at.START_BY]
    return entries[a, at.SERIAL] < entries[b, at.SERIAL]


@compiled
def _rise(entries: Any, heap: Any, place: int) -> None:
    entry = heap[place]
    while place > 0 and before(entries, entry, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = entry


@compiled
def _sink(entries: Any, heap: Any, place: int, count: int) -> None:
    entry = heap[place]
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and before(entries, heap[child + 1], heap[child]):
            child += 1
        if not before(entries, heap[child], entry):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = entry


@compiled
def push(tables: Any, queue: int, entry: int) -> None:
    """Put an entry into a queue."""
    count = tables.words[at.QUEUED + queue]
    tables.queues[queue, count] = entry
    tables.words[at.QUEUED + queue] = count + 1
    _rise(tables.entries, tables.queues[queue], count)


@compiled
def take(tables: Any, queue: int) -> Any:
    """Take the first entry out of a queue that is not empty."""
    heap = tables.queues[queue]
    first = heap[0]
    count = tables.words[at.QUEUED + queue] = tables.words[at.QUEUED + queue] - 1
    if count:
        heap[0] = heap[count]
        _sink(tables.entries, heap, 0, count)
    return first


@compiled
def take_out(tables: Any, queue: int, entry: int) -> None:
    """Take an entry out of its queue, wherever it stands."""
    heap = tables.queues[queue]
    place = 0
    while heap[place] != entry:
        place += 1
    count = tables.words[at.QUEUED + queue] = tables.words[at.QUEUED + queue] - 1
    if place < count:
        heap[place] = heap[count]
        _sink(tables.entries, heap, place, count)
        _rise(tables.entries, heap, place)


@compiled
def new_entry(t: Any) -> Any:
    """An entry to be filled; there is one for each query that may wait or have a slot, and one more."""
    t.words[at.FREE_ENTRIES] -= 1
    return t.free[t.words[at.FREE_ENTRIES]]


@compiled
def free_entry(t: Any, entry: int) -> None:
    """The query of an entry that has left queue and slot has ended."""
    t.entries[entry, at.STATE] = at.FREE
    t.free[t.words[at.FREE_ENTRIES]] = entry
    t.words[at.FREE_ENTRIES] += 1


@compiled
def leave(t: Any, entry: int) -> None:
    """A query has left its queue or its slot: it was cancelled, or its client is gone."""
    if t.entries[entry, at.STATE] == at.WAITING:
        take_out(t, queue_of(t, entry), entry)
    elif t.entries[entry, at.STATE] == at.PAUSED:
        unlist(t, at.HELD_BACK, entry)
    else:
        unlist(t, t.entries[entry, at.STAGE], entry)
    t.entries[entry, at.STATE] = at.FREE


@compiled
def queue_of(t: Any, entry: int) -> Any:
    """The queue that an entry waits in."""
    return at.DECODE if t.words[at.RULES] >= at.FIFO else t.entries[entry, at.STAGE]


@compiled
def list_in(t: Any, which: int, entry: int) -> None:
    """It is active or paused from now on."""
    t.entries[entry, at.PLACE] = t.words[at.LISTED + which]
    t.lists[which, t.words[at.LISTED + which]] = entry
    t.words[at.LISTED + which] += 1


@compiled
def unlist(t: Any, which: int, entry: int) -> None:
    """Its place goes to the last of the list."""
    t.words[at.LISTED + which] -= 1
    last, place = t.lists[which, t.words[at.LISTED + which]], t.entries[entry, at.PLACE]
    t.lists[which, place] = last
    t.entries[last, at.PLACE] = place


@compiled
def note(t: Any, kind: int, entry: int) -> None:
    """A change of the schedule that is being made."""
    t.changes[kind, t.words[at.CHANGED + kind]] = entry
    t.words[at.CHANGED + kind] += 1
