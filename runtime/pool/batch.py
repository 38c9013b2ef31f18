"""Changes of the running batch: a query gets a slot of the engine, is paused there, or resumes."""

from runtime.pool.compiled import compiled
from runtime.pool.queues import add_to_list, append, pop, precedes, remove_from_list
from runtime.pool.tables import ACTIVE, DECODE, PAUSED, Tables, active_count


@compiled
def has_decode_slot(t: Tables, decode_slots: int) -> bool:
    """Return whether a slot is free for a decode query, of which `decode_slots` may be active."""
    return active_count(t) < t.slots and t.active[DECODE].count < decode_slots


@compiled
def can_start_decode(t: Tables) -> bool:
    """Return whether a decode query is paused, or waits and the engine has a slot for it."""
    return t.paused.count > 0 or can_admit(t, DECODE)


@compiled
def can_admit(t: Tables, stage: int) -> bool:
    """Return whether a query of a stage waits and the engine has a slot for it."""
    return t.queues[stage].count > 0 and active_count(t) + t.paused.count < t.engine_slots


@compiled
def start(t: Tables, stage: int) -> int:
    """Activate the next query of a stage, a waiting or a paused one, and return it."""
    number = -1
    if stage == DECODE and t.paused.count:
        number = t.paused.numbers[0]
        for i in range(1, t.paused.count):
            if precedes(t, t.paused.numbers[i], number):
                number = t.paused.numbers[i]
        if can_admit(t, DECODE) and precedes(t, t.queues[DECODE].numbers[0], number):
            number = -1
    if number >= 0:
        remove_from_list(t, t.paused, number)
        append(t.resumed, number)
    else:
        number = pop(t, t.queues[stage])
        t.entries[number].began = 0
        append(t.admitted, number)
    entry = t.entries[number]
    entry.began += t.total_extends
    entry.state = ACTIVE
    add_to_list(t, t.active[entry.stage], number)
    return number


@compiled
def pause_one(t: Tables) -> bool:
    """Pause the decode query that `longest_remaining` finds. Return whether there was one."""
    number = longest_remaining(t)
    if number < 0:
        return False
    remove_from_list(t, t.active[DECODE], number)
    entry = t.entries[number]
    entry.began -= t.total_extends  # while paused: minus its completed extends
    entry.state = PAUSED
    add_to_list(t, t.paused, number)
    append(t.preempted, number)
    return True


@compiled
def longest_remaining(t: Tables) -> int:
    """Return the active decode query with most extends left among those that may be paused, or -1."""
    longest, most = -1, -1
    for i in range(t.active[DECODE].count):
        number = t.active[DECODE].numbers[i]
        entry = t.entries[number]
        left = entry.extends + entry.began
        if not entry.aged and (longest < 0 or left > most):
            longest, most = number, left
    return longest
