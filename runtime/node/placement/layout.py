"""Layout of a node on a machine: assigns GPUs, and cores and memory near them, to the workers.

A spinning pool worker gets cores of its own; if there are none left, it does not spin. If the system does not report
the NUMA node of a GPU, placement is left to the kernel.
"""

import msgspec

from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, Role
from runtime.node.engine_config import VllmSection
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import CPU, NodePlan, WorkerPlan, plan_spares, plan_workers
from runtime.node.placement.pool_placement import check_device, resolve_pool_placement
from runtime.node.worker_config import WorkerSection

_PLACED: tuple[Role, ...] = ("prefill", "decode", "pool")  # a pool worker beside one has its placement


def lay_out(config: NodeConfig, machine: Machine | None = None) -> NodePlan:
    """Place every worker of `config`: GPUs by index, UUID or MIG id, cores by NUMA node. Raises `ConfigError` if that
    is impossible. Without a `machine`, devices and cores stay as configured."""
    config = resolve_pool_placement(config)
    if machine is None:
        for device in config.embedding.devices:
            check_device("embedding.devices", device)
        return plan_workers(config)
    chosen = {role: _gpus_of(role, getattr(config, role), machine) for role in _PLACED}
    plan = plan_workers(msgspec.structs.replace(config, **_as_seen_by_workers(config, chosen, machine.simulated)))
    workers = [_on_gpu(worker, chosen.get(worker.role, ())) for worker in plan.workers]
    workers = [_embedding_on_gpu(worker, machine) for worker in workers]
    if isinstance(config.model, VllmSection):
        workers = _with_gpus(workers, config.model, machine)
    _check_mig(workers, machine)
    workers = _with_cores([_with_exclusive_gpu(worker, workers) for worker in workers], machine)
    return msgspec.structs.replace(plan, config=config, workers=tuple(workers), spares=plan_spares(config, workers))


def _with_exclusive_gpu(worker: WorkerPlan, workers: list[WorkerPlan]) -> WorkerPlan:
    """Return the worker with `exclusive_gpu`: whether a pool worker is the only worker on its GPU or MIG instance."""
    if worker.role != "pool" or not worker.gpu:
        return worker
    return msgspec.structs.replace(worker, exclusive_gpu=not any(map(worker.shares_gpu_with, workers)))


def _gpus_of(role: Role, section: WorkerSection, machine: Machine) -> tuple[Gpu | None, ...]:
    """Return the GPU of each entry of `devices`; None for the CPU."""
    return tuple(None if device == CPU else machine.find(device, f"{role}.devices") for device in section.devices)


def _with_gpus(workers: list[WorkerPlan], section: VllmSection, machine: Machine) -> list[WorkerPlan]:
    """Place engines on whole GPUs."""
    placed = []
    for worker in workers:
        names = section.gpus[worker.index] if worker.role == "engine" else ()
        if not names:
            placed.append(worker)
            continue
        gpus = [machine.find(name, f"model.devices: {worker.name}") for name in names]
        first = gpus[0]
        placed.append(
            msgspec.structs.replace(
                worker,
                device=CPU if machine.simulated else worker.device,
                gpu=first.uuid,
                gpu_index=first.index,
                gpu_numbers=tuple(gpu.index for gpu in gpus),
                numa_node=first.numa_node,
            )
        )
    return placed


def _as_seen_by_workers(
    config: NodeConfig, chosen: dict[Role, tuple[Gpu | None, ...]], simulated: bool
) -> dict[str, WorkerSection]:
    """Return the sections with the devices that the processes see: each sees only its own GPU, as number 0."""
    visible = CPU if simulated else "cuda:0"
    return {
        role: msgspec.structs.replace(
            getattr(config, role), devices=tuple(CPU if gpu is None else visible for gpu in gpus)
        )
        for role, gpus in chosen.items()
    }


def _embedding_on_gpu(worker: WorkerPlan, machine: Machine) -> WorkerPlan:
    """Let a worker that only embeds on a GPU see that one, as number 0."""
    if worker.embedder == CPU or worker.gpu:
        return worker if not machine.simulated else msgspec.structs.replace(worker, embedder=CPU)
    gpu = machine.find(worker.embedder, "embedding.devices")
    visible = CPU if machine.simulated else "cuda:0"
    return msgspec.structs.replace(worker, gpu=gpu.uuid, gpu_index=gpu.index, numa_node=gpu.numa_node, embedder=visible)


def _on_gpu(worker: WorkerPlan, gpus: tuple[Gpu | None, ...]) -> WorkerPlan:
    gpu = gpus[worker.index if len(gpus) > 1 else 0] if gpus else None
    if gpu is None:
        return worker
    return msgspec.structs.replace(worker, gpu=gpu.uuid, gpu_index=gpu.index, numa_node=gpu.numa_node)


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
        return [msgspec.structs.replace(w, spin=w.spin and enough) for w in workers]
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
