"""The policy's stack of free entries, its queues (heaps by `start_by_ns`, then `serial`), and its lists of active and
paused entries."""

from ipc.native.records import Array
from runtime.pool.compiled import compiled
from runtime.pool.tables import FREE, PAUSED, WAITING, EntryList, Tables


@compiled
def precedes(t: Tables, a: int, b: int) -> bool:
    """Return whether entry `a` goes before `b`."""
    one, other = t.entries[a], t.entries[b]
    if one.start_by_ns != other.start_by_ns:
        return one.start_by_ns < other.start_by_ns
    return one.serial < other.serial


@compiled
def _sift_up(t: Tables, heap: Array[int], index: int) -> None:
    entry = heap[index]
    while index > 0 and precedes(t, entry, heap[(index - 1) // 2]):
        heap[index] = heap[(index - 1) // 2]
        index = (index - 1) // 2
    heap[index] = entry


@compiled
def _sift_down(t: Tables, heap: Array[int], index: int, count: int) -> None:
    entry = heap[index]
    while 2 * index + 1 < count:
        child = 2 * index + 1
        if child + 1 < count and precedes(t, heap[child + 1], heap[child]):
            child += 1
        if not precedes(t, heap[child], entry):
            break
        heap[index] = heap[child]
        index = child
    heap[index] = entry


@compiled
def push(t: Tables, queue: EntryList, number: int) -> None:
    append(queue, number)
    _sift_up(t, queue.numbers, queue.count - 1)


@compiled
def pop(t: Tables, queue: EntryList) -> int:
    """Pop the first entry of a queue that is not empty."""
    heap = queue.numbers
    first = heap[0]
    queue.count -= 1
    if queue.count:
        heap[0] = heap[queue.count]
        _sift_down(t, heap, 0, queue.count)
    return first


@compiled
def remove(t: Tables, queue: EntryList, number: int) -> None:
    """Remove an entry from any position of its queue."""
    heap = queue.numbers
    index = 0
    while heap[index] != number:
        index += 1
    queue.count -= 1
    if index < queue.count:
        heap[index] = heap[queue.count]
        _sift_down(t, heap, index, queue.count)
        _sift_up(t, heap, index)


@compiled
def append(entries: EntryList, number: int) -> None:
    """Append an entry to a stack, or to the changes of the current schedule."""
    entries.numbers[entries.count] = number
    entries.count += 1


@compiled
def new_entry(t: Tables) -> int:
    """Allocate an entry. There is one for each query that may wait or occupy a slot, and one more."""
    t.free.count -= 1
    return t.free.numbers[t.free.count]


@compiled
def free_entry(t: Tables, number: int) -> None:
    """Free an entry that is in no queue and no slot."""
    t.entries[number].state = FREE
    append(t.free, number)


@compiled
def release(t: Tables, number: int) -> None:
    """Remove an entry from its queue or its list."""
    entry = t.entries[number]
    if entry.state == WAITING:
        remove(t, t.queues[entry.stage], number)
    elif entry.state == PAUSED:
        remove_from_list(t, t.paused, number)
    else:
        remove_from_list(t, t.active[entry.stage], number)
    entry.state = FREE


@compiled
def add_to_list(t: Tables, entries: EntryList, number: int) -> None:
    """Append an entry to the list of active queries of its stage, or of paused ones."""
    t.entries[number].list_index = entries.count
    append(entries, number)


@compiled
def remove_from_list(t: Tables, entries: EntryList, number: int) -> None:
    """Remove an entry from its list; the last one of the list moves to its index."""
    entries.count -= 1
    last, index = entries.numbers[entries.count], t.entries[number].list_index
    entries.numbers[index] = last
    t.entries[last].list_index = index
