"""What a role's loop is handed, without a supervisor."""

import os
from typing import Any

from ipc import MemoryReference
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.plan import NodePlan
from runtime.node.worker import Worker, WorkerSpec


def make_worker(
    plan: NodePlan, name: str, epoch: int = 1, table: WorkerTable | MemoryReference | None = None, **spec: Any
) -> Worker:
    """For a role's loop that runs in this very process. `table`: one of its own if none is given; `told`: what else its
    supervisor says, of `WorkerSpec`."""
    if table is None:
        role = next(place.role for place in plan.processes if place.name == name)
        table = WorkerTable.create(role, name, plan.config.slo)
    reference = table.reference if isinstance(table, WorkerTable) else table
    return Worker(WorkerSpec(plan, name, epoch, reference, os.getpid(), **spec))
