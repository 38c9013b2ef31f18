"""Workers that come and go while the node runs: added, drained, flipped to the other role.

Nothing is lost by it. A worker that leaves is given nothing new, finishes what it has, and ends when the frontend has
let go of it. A flip starts a worker in the other role first, and drains the old one only when that one is ready, so
that capacity is never less than before: for a while the node holds one model more. The last worker of a role stays.

An added worker shares the device and the cores of the one that it is modelled on. Pools and the frontend are fixed:
their clients know them from the start.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.node.child import Child, Phase
from runtime.node.config import NodeConfig, Role
from runtime.node.placement import WorkerPlan

MOST_WORKERS = 8
Verb = Literal["add", "drain", "flip"]
_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}

log = logging.getLogger("supervisor")


class Changes:
    """What was asked for and is under way. `begin` makes a child of the node, `end` takes one out of it."""

    def __init__(
        self,
        children: Sequence[Child],
        config: NodeConfig,
        *,
        begin: Callable[[WorkerPlan], None],
        end: Callable[[Child], None],
        clock: Callable[[], float],
    ) -> None:
        self._children, self._config = children, config
        self._begin, self._end, self._clock = begin, end, clock
        self._flips: dict[str, str] = {}  # the new worker → the one that it is there for

    def ask(self, verb: Verb, what: str) -> str:
        """Begin a change of `what`: a role to add to; a role (its last ready worker) or a worker to drain or to flip.

        Returns the name of the worker that was added or leaves; of a flip, that of the new one. Raises InvalidRequest
        for what cannot be.
        """
        if verb == "add":
            role = self._role(what)
            return self._add(role, next(child.place for child in self._children if child.place.role == role))
        child = self._leaver(what)
        if verb == "drain":
            self._drain(child)
            return child.name
        name = self._add(_OTHER[child.place.role], child.place)
        self._flips[name] = child.name
        return name

    def step(self) -> None:
        """Go on where that is possible."""
        for child in list(self._children):
            old = self._named(self._flips.get(child.name, ""))
            if old is not None and child.phase is Phase.READY:
                del self._flips[child.name]
                if old.phase is Phase.READY:
                    self._drain(old)
            if child.leaving and child.process is None:
                self._flips.pop(child.name, None)
                self._end(child)
                log.info("%s has left", child.name)
            elif child.leaving and self._clock() > child.due:
                log.warning("%s has not drained within %.0f s: killed", child.name, self._config.http.request_timeout_s)
                child.kill_group()
                child.due = float("inf")

    # ---- the parts

    def _add(self, role: Role, like: WorkerPlan) -> str:
        taken = {child.place.index for child in self._children if child.place.role == role}
        if len(taken) >= MOST_WORKERS:
            raise InvalidRequest(f"the node has {len(taken)} {role} workers, the limit is {MOST_WORKERS}")
        index = min(set(range(MOST_WORKERS)) - taken)
        threads = self._config.prefill.threads if role == "prefill" else self._config.decode.threads
        place = msgspec.structs.replace(like, role=role, index=index, threads=threads)
        log.info("%s is added", place.name)
        self._begin(place)
        return place.name

    def _drain(self, child: Child) -> None:
        log.info("%s leaves: it drains first", child.name)
        child.leaving, child.phase = True, Phase.DRAINING
        child.due = self._clock() + self._config.http.request_timeout_s
        child.send(signal.SIGHUP)

    def _role(self, role: str) -> Role:
        for known in _OTHER:
            if role == known and self._config.model is not None:
                return known
        raise InvalidRequest(f"{role!r}: only prefill and decode workers of a node with a model come and go")

    def _leaver(self, what: str) -> Child:
        """The worker that is meant, if it can be spared."""
        child = self._named(what)
        role = self._role(child.place.role if child else what)
        if child is None:
            child = next((found for found in reversed(self._children) if self._stays(found, role)), None)
        elif not self._stays(child, role):
            raise InvalidRequest(f"{child.name} is {'about to leave' if self._leaves(child) else child.phase.value}")
        if child is None or sum(self._stays(found, role) for found in self._children) < 2:
            raise InvalidRequest(f"that would leave the node without a ready {role} worker; add one first")
        return child

    def _stays(self, child: Child, role: Role) -> bool:
        return child.place.role == role and child.phase is Phase.READY and not self._leaves(child)

    def _leaves(self, child: Child) -> bool:
        return child.leaving or child.name in self._flips.values()

    def _named(self, name: str) -> Child | None:
        return next((child for child in self._children if child.name == name), None)
