"""Layout of a node on a machine: assigns GPUs, and cores and memory near them, to the workers.

A spinning pool worker gets cores of its own; if there are none left, it does not spin. If the system does not report
the NUMA node of a GPU, placement is left to the kernel.
"""

from collections.abc import Sequence

import msgspec

from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.node.engine_config import VllmSection
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import CPU, NodePlan, WorkerPlan, plan_spares, plan_workers
from runtime.node.placement.pool_placement import check_device, resolve_pool_placement


def lay_out(config: NodeConfig, machine: Machine | None = None) -> NodePlan:
    """Place every worker of `config`: GPUs by index, UUID or MIG id, cores by NUMA node. Raises `ConfigError` if that
    is impossible. Without a `machine`, devices and cores stay as configured."""
    config = resolve_pool_placement(config)
    plan = plan_workers(config)
    if machine is None:
        for key, device in (named for worker in plan.workers for named in _devices(worker, config)):
            check_device(key, device)
        return plan
    # a pool worker beside another one has its device: an error names the other's key
    order = sorted(plan.workers, key=lambda worker: worker.role == "pool")
    gpus = {worker.name: [machine.find(name, key) for key, name in _devices(worker, config)] for worker in order}
    workers = [_on_gpus(worker, gpus[worker.name], machine.simulated) for worker in plan.workers]
    _check_mig(workers, machine)
    workers = _with_cores([_with_exclusive_gpu(worker, workers) for worker in workers], machine)
    return msgspec.structs.replace(plan, workers=tuple(workers), spares=plan_spares(config, workers))


def _devices(worker: WorkerPlan, config: NodeConfig) -> list[tuple[str, str]]:
    """Return the GPUs that a worker is to use, as configured, each with the key that names it."""
    if worker.role == "engine":
        names = config.model.gpus[worker.index] if isinstance(config.model, VllmSection) else ()
        return [(f"model.devices: {worker.name}", name) for name in names]
    if worker.device != CPU:
        return [(f"{worker.role}.devices", worker.device)]
    return [("embedding.devices", worker.embedder)] if worker.embedder != CPU else []


def _on_gpus(worker: WorkerPlan, gpus: Sequence[Gpu], simulated: bool) -> WorkerPlan:
    """Return the worker on these GPUs. Its process sees only them, the first as number 0."""
    if not gpus:
        return worker
    visible = CPU if simulated else "cuda:0"
    return msgspec.structs.replace(
        worker,
        device=CPU if worker.device == CPU else visible,
        embedder=CPU if worker.embedder == CPU else visible,
        gpu=gpus[0].uuid,
        gpu_index=gpus[0].index,
        gpu_numbers=tuple(gpu.index for gpu in gpus) if worker.role == "engine" else (),
        numa_node=gpus[0].numa_node,
    )


def _with_exclusive_gpu(worker: WorkerPlan, workers: list[WorkerPlan]) -> WorkerPlan:
    """Return the worker with `exclusive_gpu`: whether a pool worker is the only worker on its GPU or MIG instance."""
    if worker.role != "pool" or not worker.gpu:
        return worker
    return msgspec.structs.replace(worker, exclusive_gpu=not any(map(worker.shares_gpu_with, workers)))


def _check_mig(workers: list[WorkerPlan], machine: Machine) -> None:
    """Check MIG: a partitioned GPU cannot be used as a whole, and MIG instances do not support CUDA IPC."""
    instances = {gpu.uuid for gpu in machine.gpus if gpu.is_mig}
    partitioned = {gpu.index.partition(":")[0] for gpu in machine.gpus if gpu.is_mig}
    for worker in workers:
        role = "embedding" if worker.only_embeds_on_gpu else worker.role
        if worker.gpu in instances and role in ("prefill", "decode"):
            raise ConfigError(
                f"{role}.devices: {worker.gpu} is a MIG instance, which has no CUDA IPC for the hand-over of KV"
            )
        if worker.gpu and worker.gpu_index in partitioned:
            ids = ", ".join(gpu.uuid for gpu in machine.gpus if gpu.index.startswith(f"{worker.gpu_index}:"))
            raise ConfigError(
                f"{role}.devices: GPU {worker.gpu_index} is partitioned into MIG instances; select one of {ids}"
            )


def _with_cores(workers: list[WorkerPlan], machine: Machine) -> list[WorkerPlan]:
    """Assign cores to workers on GPUs without configured cores; spinning workers choose first."""
    if machine.simulated:
        enough = len(machine.cores) > len(workers)
        return [msgspec.structs.replace(w, spin=w.spin and enough and not w.paired_with) for w in workers]
    used = {core for worker in workers for core in worker.cores}
    placed: dict[str, WorkerPlan] = {}
    for worker in workers:
        if worker.role != "pool" or not worker.gpu or worker.cores:
            continue
        free = [core for core in _local_cores(worker, machine) if core not in used]
        if len(free) > 1:  # one is left for the other workers there
            own = (free[-1],)
            used.update(own)
            placed[worker.name] = msgspec.structs.replace(worker, cores=own)
        else:
            placed[worker.name] = msgspec.structs.replace(worker, spin=False)
    for worker in workers:
        if worker.role != "pool" and worker.gpu and not worker.cores and not worker.only_embeds_on_gpu:
            shared = tuple(core for core in _local_cores(worker, machine) if core not in used)
            placed[worker.name] = msgspec.structs.replace(worker, cores=shared)
    return [placed.get(worker.name, worker) for worker in workers]


def _local_cores(worker: WorkerPlan, machine: Machine) -> tuple[int, ...]:
    """Return the cores of the GPU's NUMA node, all cores if it is unknown."""
    if worker.numa_node is None:
        return machine.cores
    return machine.node_cores.get(worker.numa_node, machine.cores)
