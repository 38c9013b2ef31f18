"""Workers that come and go while the node runs: added, drained one by one or with their GPU, flipped to the other role.

Nothing is lost by it. A worker that leaves is given nothing new, finishes what it has, and ends when the frontend has
let go of it; a pool worker's clients turn to the other replicas, and find it again if it comes back. A flip starts a
worker in the other role first, and drains the old one only when that one is ready, so that capacity is never less than
before: for a while the node holds one model more. The last worker of a role stays, and so does that of a shard.

A place of the plan whose worker has left is taken again before any other. Beyond the plan, an added prefill or decode
worker shares the device and the cores of the one that it is modelled on; pools are never more than planned, since
their clients know them from the start. The frontend is fixed.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from runtime.errors import InvalidRequest
from runtime.node.config import MOST_WORKERS, Role
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.node.supervisor.supervised_worker import Child, Desired, Phase

Verb = Literal["add", "drain", "flip"]
_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
GPU_NAMES = ("cuda:", "GPU-", "MIG-", "SIM-")
"""What the name of a GPU begins with."""

log = logging.getLogger("supervisor")


class Changes:
    """What was asked for and is under way. `begin` makes a child of the node, `end` takes one out of it."""

    def __init__(
        self,
        children: Sequence[Child],
        plan: NodePlan,
        *,
        begin: Callable[[WorkerPlan], None],
        end: Callable[[Child], None],
    ) -> None:
        self._children, self._config, self._planned = children, plan.config, plan.workers
        self._begin, self._end = begin, end
        self._flips: dict[str, str] = {}  # the new worker → the one that it is there for

    def ask(self, verb: Verb, what: str) -> tuple[str, ...]:
        """Begin a change of `what`: a role, a worker, or a GPU ("cuda:N" or its UUID).

        A role is one to add to, or its last ready worker to drain or flip; a GPU's workers are all drained, and all of
        the plan's that are missing there are added. Returns the names of the workers that are added or leave; of a
        flip, that of the new one. Raises InvalidRequest for what cannot be, and then nothing has begun.
        """
        if verb == "add":
            return self._add_on(what) if what.startswith(GPU_NAMES) else (self._add(self._role(what, "pool")),)
        if verb == "drain":
            leavers = self._leavers(what, "pool")
            for child in leavers:
                self._drain(child)
            return tuple(child.name for child in leavers)
        if what.startswith(GPU_NAMES):
            raise InvalidRequest(f"flip a role's last worker or one by its name, not {what}")
        (child,) = self._leavers(what)
        name = self._add_like(child.place, _OTHER[child.place.role])
        self._flips[name] = child.name
        return (name,)

    def step(self) -> None:
        """Go on where that is possible."""
        for child in list(self._children):
            old = self._named(self._flips.get(child.name, ""))
            if old is not None and child.phase is Phase.READY:
                del self._flips[child.name]
                if old.phase is Phase.READY:
                    self._drain(old)
            if child.desired is Desired.GONE and child.process is None:
                self._flips.pop(child.name, None)
                self._end(child)
                log.info("%s has left", child.name)

    @property
    def under_way(self) -> bool:
        """Whether somebody comes, leaves or is not ready."""
        return bool(self._flips) or not all(self._stays(child) for child in self._children)

    @property
    def vacant(self) -> tuple[WorkerPlan, ...]:
        """The places of the plan whose workers have left."""
        return tuple(place for place in self._planned if self._named(place.name) is None)

    # ---- coming

    def _add(self, role: Role) -> str:
        place = next((place for place in self.vacant if place.role == role), None)
        if place is not None:
            return self._start(place)
        if role == "pool":
            planned = sum(place.role == "pool" for place in self._planned)
            raise InvalidRequest(f"all {planned} pool workers of the plan are there, and there can be no others")
        return self._add_like(next(child.place for child in self._children if child.place.role == role), role)

    def _add_on(self, gpu: str) -> tuple[str, ...]:
        missing = [place for place in self.vacant if place.is_on(gpu)]
        if not missing:
            raise InvalidRequest(f"no worker of the plan is missing on {gpu}")
        return tuple(self._start(place) for place in missing)

    def _add_like(self, like: WorkerPlan, role: Role) -> str:
        taken = {child.place.index for child in self._children if child.place.role == role}
        if len(taken) >= MOST_WORKERS:
            raise InvalidRequest(f"the node has {len(taken)} {role} workers, the limit is {MOST_WORKERS}")
        # The name of a place on another GPU is left to the worker that will be there again.
        taken |= {place.index for place in self._planned if place.role == role and place.gpu != like.gpu}
        index = next(index for index in itertools.count() if index not in taken)
        threads = self._config.prefill.threads if role == "prefill" else self._config.decode.threads
        return self._start(msgspec.structs.replace(like, role=role, index=index, threads=threads))

    def _start(self, place: WorkerPlan) -> str:
        log.info("%s is added", place.name)
        self._begin(place)
        return place.name

    # ---- leaving

    def _drain(self, child: Child) -> None:
        log.info("%s leaves: it drains first", child.name)
        child.desired = Desired.GONE

    def _leavers(self, what: str, *more: Role) -> list[Child]:
        """The workers that are meant, if they can be spared. Those of a GPU need not be ready: it may be broken."""
        roles: set[Role]
        if what.startswith(GPU_NAMES):
            leavers = [child for child in self._children if child.place.is_on(what) and not self._leaves(child)]
            roles = {child.place.role for child in leavers}
            if not leavers:
                staying = [child.place for child in self._children if child.place.gpu and not self._leaves(child)]
                gpus = sorted({place.shown_device for place in staying})
                raise InvalidRequest(f"no worker stays on {what}; workers stay on {', '.join(gpus) or 'no GPU'}")
        else:
            child = self._named(what)
            if child is None and what not in get_args(Role):
                there = ", ".join(found.name for found in self._children if found.place.role in self._roles(*more))
                raise InvalidRequest(f"there is no worker {what!r}; there are {there or 'none that come and go'}")
            role = self._role(child.place.role if child else what, *more)
            ready = [found for found in reversed(self._children) if found.place.role == role and self._stays(found)]
            if child is not None and child not in ready:
                raise InvalidRequest(
                    f"{child.name} is {'about to leave' if self._leaves(child) else child.phase.value}"
                )
            leavers, roles = ready[:1] if child is None else [child], {role}
        for role in roles:
            self._check_spared(leavers, role)
        return leavers

    def _check_spared(self, leavers: Sequence[Child], role: Role) -> None:
        """Raises InvalidRequest unless the role, and each shard that its pools serve, has a ready worker without."""
        left = [found for found in self._children if self._stays(found) and found not in leavers]
        indexes = {found.place.index for found in left if found.place.role == role}
        if not indexes:
            advice = "" if role == "pool" else "; add one first"
            raise InvalidRequest(f"that would leave the node without a ready {role} worker{advice}")
        for collection in self._config.collections if role == "pool" else ():
            for shard in range(collection.shards):
                if not any(index % collection.shards == shard for index in indexes):
                    raise InvalidRequest(
                        f"that would leave shard {shard} of collection {collection.name!r} without a ready pool worker"
                    )

    # ---- who is meant

    def _role(self, role: str, *more: Role) -> Role:
        """A role whose workers may do so: prefill, decode or one of `more`."""
        known = self._roles(*more)
        for one in known:
            if role == one:
                return one
        roles = ", ".join(known) or "none without a [model]"
        raise InvalidRequest(f"{role!r} is no role whose workers come and go like that; such roles here: {roles}")

    def _roles(self, *more: Role) -> list[Role]:
        """The roles of this node whose workers may: prefill, decode and `more`."""
        roles: list[Role] = list(_OTHER) if self._config.own_model is not None else []
        return [*roles, *(more if self._config.collections else ())]

    def _stays(self, child: Child) -> bool:
        return child.phase is Phase.READY and not self._leaves(child)

    def _leaves(self, child: Child) -> bool:
        return child.desired is Desired.GONE or child.name in self._flips.values()

    def _named(self, name: str) -> Child | None:
        return next((child for child in self._children if child.name == name), None)
