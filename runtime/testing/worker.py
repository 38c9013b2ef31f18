"""Worker contexts without a supervisor."""

import os
from typing import Any

from ipc import MemoryReference
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.plan import NodePlan
from runtime.node.worker import Worker, WorkerSpec


def make_worker(
    plan: NodePlan, name: str, epoch: int = 1, table: WorkerTable | MemoryReference | None = None, **spec: Any
) -> Worker:
    """Return the context of a role's loop that runs in this process. `table`: by default a new one; `spec`: other
    fields of `WorkerSpec`."""
    if table is None:
        role = next(worker.role for worker in plan.processes if worker.name == name)
        table = WorkerTable.create(role, name, plan.config.slo)
    reference = table.reference if isinstance(table, WorkerTable) else table
    return Worker(WorkerSpec(plan, name, epoch, reference, os.getpid(), **spec))
