"""Virtual clock: planned events, processed in order. Uses neither a real clock nor random numbers."""

from collections.abc import Callable

from ipc.native.records import Array, address_of, array_from, new_array
from runtime.simulator.stages import schedule as at
from runtime.simulator.stages.decode_core import run

Action = Callable[[], None]
_CAPACITY = 1 << 10  # initially


class Events:
    """Planned events by time (`schedule`), of which compiled code processes those that do not concern Python.

    `pools` and `decodes`: addresses of these workers' states, 0 without decode workers. `handlers`: what to call with
    the subject and status of an event for which the compiled code returns, by its reason.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.processed = 0
        self.pools = self.decodes = 0
        self.handlers: dict[int, Callable[[int, int], None]] = {at.CALLED: self._call}
        self._actions: dict[int, Action] = {}
        self._schedule = at.Schedule(capacity=_CAPACITY, events=new_array(at.Event, _CAPACITY))
        self._address = address_of(self._schedule)
        self._stopped = False

    @property
    def schedule(self) -> Array[at.Schedule]:
        """The schedule, for compiled code."""
        return array_from(at.Schedule, self._address)

    def at(self, when_ns: int, action: Action) -> None:
        """Plan `action` for a time that is not in the past."""
        while not (number := at.plan_call(self._address, when_ns)):
            self.ensure_capacity()
        self._actions[number] = action

    def after(self, delay_ns: int, action: Action) -> None:
        self.at(self.now_ns + delay_ns, action)

    def run(self) -> None:
        """Process events until none is planned or `stop` is called."""
        self._stopped = False
        while not self._stopped:
            reason, now_ns, subject, status = run(self.decodes, self.pools)
            if reason == at.NO_EVENT:
                return
            if reason != at.OUT_OF_CAPACITY:
                self.now_ns = now_ns
                self.processed += 1
            self.handlers[reason](subject, status)

    def stop(self) -> None:
        """End `run` after the current event; planned events stay planned."""
        self._stopped = True

    def ensure_capacity(self, most: int = 0) -> None:
        """Provide capacity for twice `most` events, and for as many again as are planned."""
        schedule = self._schedule
        if schedule.capacity < max(2 * most, 2 * schedule.count + 2):
            capacity = max(2 * most, 2 * schedule.capacity)
            events = new_array(at.Event, capacity)
            for i in range(schedule.count):
                events[i] = schedule.events[i]
            schedule.events, schedule.capacity = events, capacity

    def _call(self, number: int, _: int) -> None:
        self._actions.pop(number)()


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
