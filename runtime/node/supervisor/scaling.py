"""Scaling of a running node: add workers, drain workers or whole GPUs, flip workers to the other role.

No request is lost. A worker that is drained receives no new requests, finishes those it has, and ends once the frontend
has released it; clients of a pool worker switch to its replicas, and find it again if it is added back. A flip starts a
worker in the other role first and drains the old one only when the new one is ready, so capacity never drops: for a
while the node holds one more model. The last ready worker of a role, or of a shard, cannot be drained.

Vacant placements of the plan are filled first. Beyond the plan, an added prefill or decode worker shares device and
cores with the worker that it is modelled on. Pool workers cannot exceed the plan, because their clients know the
endpoints from the start. The frontend is fixed. A flip, or a worker beyond the plan, is refused if its GPU has no
memory for it. Instances of vLLM are drained and added back by the plan like pool workers; they keep their stage.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from runtime.errors import InvalidRequest
from runtime.node.config import Role
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.node.supervisor.supervised_worker import Desired, Phase, SupervisedWorker
from runtime.node.worker_config import MAX_WORKERS

ScaleAction = Literal["add", "drain", "flip"]
FIXED_ROLES: tuple[Role, ...] = ("pool", "engine")
"""Roles whose workers cannot exceed the plan, because their clients know only the plan's endpoints."""
_OTHER_ROLE: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
GPU_NAMES = ("cuda:", "GPU-", "MIG-", "SIM-")
"""Prefixes of GPU names."""

log = logging.getLogger("supervisor")


class Scaler:
    """Scaling operations in progress. `add` adds a worker to the supervisor, `remove` removes one that has ended.

    `check_memory` raises `InvalidRequest` if a GPU has no memory for a worker.
    """

    def __init__(
        self,
        workers: Sequence[SupervisedWorker],
        plan: NodePlan,
        *,
        add: Callable[[WorkerPlan], None],
        remove: Callable[[SupervisedWorker], None],
        check_memory: Callable[[WorkerPlan], None],
    ) -> None:
        self._workers, self._config, self._planned = workers, plan.config, plan.workers
        self._add_worker, self._remove_worker, self._check_memory = add, remove, check_memory
        self._flips: dict[str, str] = {}  # new worker → the worker that it replaces

    def request(self, action: ScaleAction, target: str) -> tuple[str, ...]:
        """Start an operation on `target`: a role, a worker, or a GPU ("cuda:N" or its UUID).

        With a role, one worker is added, or its last ready worker is drained or flipped; with a GPU, all of its workers
        are drained, or all planned workers that are missing there are added. Returns the names of the added or drained
        workers; of a flip, the name of the new one. Raises `InvalidRequest`, and then nothing has started.
        """
        own: list[Role] = list(_OTHER_ROLE) if self._config.own_model is not None else []
        planned = {placement.role for placement in self._planned}
        fixed = [role for role in FIXED_ROLES if role in planned]
        roles, on_gpu = own if action == "flip" else own + fixed, target.startswith(GPU_NAMES)
        if action == "add":
            return self._add_on(target) if on_gpu else (self._add(_accepted(target, roles)),)
        if action == "drain":
            draining = self._select_on(target) if on_gpu else self._select(target, roles)
            for worker in draining:
                self._drain(worker)
            return tuple(worker.name for worker in draining)
        if on_gpu:
            raise InvalidRequest(f"cannot flip {target}: give a role, whose last worker is flipped, or a worker's name")
        (worker,) = self._select(target, roles)
        name = self._add_like(worker.placement, _OTHER_ROLE[worker.placement.role])
        self._flips[name] = worker.name
        return (name,)

    def step(self) -> bool:
        """Advance the operations in progress. Returns whether a flip ended because its new worker cannot run."""
        failed = False
        for worker in list(self._workers):
            old = self._find(self._flips.get(worker.name, ""))
            if old is not None and worker.phase is Phase.READY:
                del self._flips[worker.name]
                if old.phase is Phase.READY:
                    self._drain(old)
            if worker.desired is Desired.STOP and worker.process is None:
                failed |= self._flips.pop(worker.name, None) is not None
                self._remove_worker(worker)
                log.info("%s has left", worker.name)
        return failed

    @property
    def in_progress(self) -> bool:
        """Whether a worker is being added, drained or flipped, or is not ready."""
        return bool(self._flips) or not all(self._is_serving(worker) for worker in self._workers)

    @property
    def vacant(self) -> tuple[WorkerPlan, ...]:
        """Planned placements without a worker."""
        return tuple(placement for placement in self._planned if self._find(placement.name) is None)

    # ---- adding

    def _add(self, role: Role) -> str:
        vacant = next((placement for placement in self.vacant if placement.role == role), None)
        if vacant is not None:
            return self._start(vacant)
        if role in FIXED_ROLES:
            planned = sum(placement.role == role for placement in self._planned)
            raise InvalidRequest(f"all {planned} {role} workers of the plan are running; the plan limits their number")
        return self._add_like(next(w.placement for w in self._workers if w.placement.role == role), role)

    def _add_on(self, gpu: str) -> tuple[str, ...]:
        missing = [placement for placement in self.vacant if placement.is_on(gpu)]
        if not missing:
            raise InvalidRequest(f"no worker of the plan is missing on {gpu}")
        return tuple(self._start(placement) for placement in missing)

    def _add_like(self, model: WorkerPlan, role: Role) -> str:
        used = {worker.placement.index for worker in self._workers if worker.placement.role == role}
        if len(used) >= MAX_WORKERS:
            raise InvalidRequest(f"the node has {len(used)} {role} workers, the limit is {MAX_WORKERS}")
        # The name of a vacant placement on another GPU stays reserved for the worker that returns there.
        used |= {p.index for p in self._planned if p.role == role and p.gpu != model.gpu}
        index = next(index for index in itertools.count() if index not in used)
        added = msgspec.structs.replace(model, role=role, index=index)
        self._check_memory(added)
        return self._start(added)

    def _start(self, placement: WorkerPlan) -> str:
        log.info("%s is added", placement.name)
        self._add_worker(placement)
        return placement.name

    # ---- draining

    def _drain(self, worker: SupervisedWorker) -> None:
        log.info("%s leaves: it drains first", worker.name)
        worker.desired = Desired.STOP

    def _select_on(self, gpu: str) -> list[SupervisedWorker]:
        """Return a GPU's workers, to drain them. They need not be ready, since it may have failed. Raises
        `InvalidRequest` if a role or shard would be left without a ready worker."""
        draining = [w for w in self._workers if w.placement.is_on(gpu) and not self._is_leaving(w)]
        if not draining:
            staying = [w.placement for w in self._workers if w.placement.gpu and not self._is_leaving(w)]
            gpus = sorted({placement.shown_device for placement in staying})
            raise InvalidRequest(f"no worker runs on {gpu}; GPUs with workers: {', '.join(gpus) or 'none'}")
        for role in {worker.placement.role for worker in draining}:
            self._check_remaining(draining, role)
        return draining

    def _select(self, target: str, roles: Sequence[Role]) -> list[SupervisedWorker]:
        """Return the worker of that name, or the last ready one of a role, to drain it. Raises as `_select_on`."""
        named = self._find(target)
        if named is None and target not in get_args(Role):
            known = ", ".join(w.name for w in self._workers if w.placement.role in roles)
            raise InvalidRequest(f"no worker {target!r}; available: {known or 'none'}")
        role = _accepted(named.placement.role if named else target, roles)
        ready = [w for w in reversed(self._workers) if w.placement.role == role and self._is_serving(w)]
        if named is not None and named not in ready:
            raise InvalidRequest(
                f"{named.name} is {'already draining' if self._is_leaving(named) else named.phase.value}"
            )
        draining = ready[:1] if named is None else [named]
        self._check_remaining(draining, role)
        return draining

    def _check_remaining(self, draining: Sequence[SupervisedWorker], role: Role) -> None:
        """Raise `InvalidRequest` unless the role, and each shard that its pools serve, keeps a ready worker."""
        remaining = [worker for worker in self._workers if self._is_serving(worker) and worker not in draining]
        indexes = {worker.placement.index for worker in remaining if worker.placement.role == role}
        if not indexes:
            advice = "" if role == "pool" else "; add one first"
            raise InvalidRequest(f"that would leave the node without a ready {role} worker{advice}")
        for collection in self._config.collections if role == "pool" else ():
            for shard in range(collection.shards):
                if not any(index % collection.shards == shard for index in indexes):
                    raise InvalidRequest(
                        f"that would leave shard {shard} of collection {collection.name!r} without a ready pool worker"
                    )

    # ---- lookups

    def _is_serving(self, worker: SupervisedWorker) -> bool:
        return worker.phase is Phase.READY and not self._is_leaving(worker)

    def _is_leaving(self, worker: SupervisedWorker) -> bool:
        return worker.desired is Desired.STOP or worker.name in self._flips.values()

    def _find(self, name: str) -> SupervisedWorker | None:
        return next((worker for worker in self._workers if worker.name == name), None)


def _accepted(role: str, roles: Sequence[Role]) -> Role:
    """Return `role` if it is one of `roles`. Raises `InvalidRequest`."""
    for scalable in roles:
        if role == scalable:
            return scalable
    known = ", ".join(roles) or "none without a [model]"
    raise InvalidRequest(f"this command does not accept role {role!r}; accepted on this node: {known}")
