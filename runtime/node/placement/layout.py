"""A node laid out on a machine: every worker gets its GPU, and the cores and memory that are near it.

A pool worker spins, so it gets cores of its own; where there are none to spare, it does not spin. What the system does
not say (a GPU's NUMA node) is left to the kernel, not guessed.
"""

import msgspec

from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, Role, WorkerSection
from runtime.node.engine_config import VllmSection
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import CPU, NodePlan, WorkerPlan, plan_spares, plan_workers
from runtime.node.placement.pool_placement import resolve_pool_placement

_PLACED: tuple[Role, ...] = ("prefill", "decode", "pool")  # a pool beside them is where they are


def lay_out(config: NodeConfig, machine: Machine | None = None) -> NodePlan:
    """Every worker of `config` in its place: GPUs found by index, UUID or MIG id, cores by their NUMA nodes. Raises
    `ConfigError` for what cannot run. Without a `machine` devices and cores stay as they are written.
    """
    config = resolve_pool_placement(config)
    if machine is None:
        return plan_workers(config)
    chosen = {role: _gpus_of(role, getattr(config, role), machine) for role in _PLACED}
    plan = plan_workers(msgspec.structs.replace(config, **_as_seen_inside(config, chosen, machine.simulated)))
    workers = [_on(worker, chosen.get(worker.role, ()), machine) for worker in plan.workers]
    if isinstance(config.model, VllmSection):
        workers = _with_gpus(workers, config.model, machine)
    _check_mig(workers, machine)
    workers = _with_cores([_with_exclusive_gpu(worker, workers) for worker in workers], machine)
    return msgspec.structs.replace(plan, config=config, workers=tuple(workers), spares=plan_spares(config, workers))


def _with_exclusive_gpu(worker: WorkerPlan, workers: list[WorkerPlan]) -> WorkerPlan:
    """With whether a pool worker has its GPU, or instance of one, to itself."""
    if worker.role != "pool" or not worker.gpu:
        return worker
    others = [other for other in workers if other.name != worker.name]
    exclusive = not any(other.is_on(name) for other in others for name in (worker.gpu, f"cuda:{worker.gpu_index}"))
    return msgspec.structs.replace(worker, exclusive_gpu=exclusive)


def _gpus_of(role: Role, section: WorkerSection, machine: Machine) -> tuple[Gpu | None, ...]:
    """The GPU of each entry of `devices`; None for the CPU."""
    found: list[Gpu | None] = []
    for device in section.devices:
        try:
            found.append(None if device == CPU else machine.find(device))
        except ConfigError as error:
            raise ConfigError(f"{role}.devices: {error.message}") from error
    return tuple(found)


def _with_gpus(workers: list[WorkerPlan], section: VllmSection, machine: Machine) -> list[WorkerPlan]:
    """The engines on their GPUs, whole ones."""
    placed = []
    for worker in workers:
        names = section.gpus[worker.index] if worker.role == "engine" else ()
        if not names:
            placed.append(worker)
            continue
        try:
            gpus = [machine.find(name) for name in names]
        except ConfigError as error:
            raise ConfigError(f"model.devices: {worker.name}: {error.message}") from error
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


def _as_seen_inside(
    config: NodeConfig, chosen: dict[Role, tuple[Gpu | None, ...]], simulated: bool
) -> dict[str, WorkerSection]:
    """The sections with devices as the processes will see them: each sees its own GPU alone, as number 0."""
    inside = CPU if simulated else "cuda:0"
    return {
        role: msgspec.structs.replace(
            getattr(config, role), devices=tuple(CPU if gpu is None else inside for gpu in gpus)
        )
        for role, gpus in chosen.items()
    }


def _on(worker: WorkerPlan, gpus: tuple[Gpu | None, ...], machine: Machine) -> WorkerPlan:
    gpu = gpus[worker.index if len(gpus) > 1 else 0] if gpus else None
    if gpu is None:
        return worker
    return msgspec.structs.replace(worker, gpu=gpu.uuid, gpu_index=gpu.index, numa_node=gpu.numa_node)


def _check_mig(workers: list[WorkerPlan], machine: Machine) -> None:
    """A GPU that is cut into instances runs nothing as a whole, and instances cannot share memory with each other."""
    instances = {gpu.uuid for gpu in machine.gpus if gpu.is_mig}
    cut = {gpu.index.partition(":")[0] for gpu in machine.gpus if gpu.is_mig}
    for worker in workers:
        if worker.gpu in instances and worker.role in ("prefill", "decode"):
            raise ConfigError(
                f"{worker.role}.devices: {worker.gpu} is a MIG instance, which has no CUDA IPC to hand KV over with"
            )
        if worker.gpu and worker.gpu_index in cut:
            ids = ", ".join(gpu.uuid for gpu in machine.gpus if gpu.index.startswith(f"{worker.gpu_index}:"))
            raise ConfigError(
                f"{worker.role}.devices: GPU {worker.gpu_index} is cut into MIG instances, name one: {ids}"
            )


def _with_cores(workers: list[WorkerPlan], machine: Machine) -> list[WorkerPlan]:
    """Cores for the workers on GPUs that have none in the configuration; the spinning ones choose first."""
    if machine.simulated:
        enough = len(machine.cores) > len(workers)
        return [msgspec.structs.replace(w, spin=w.spin and enough) for w in workers]
    taken = {core for worker in workers for core in worker.cores}
    placed: dict[str, WorkerPlan] = {}
    for worker in workers:
        if worker.role != "pool" or not worker.gpu or worker.cores:
            continue
        free = [core for core in _near(worker, machine) if core not in taken]
        if len(free) > worker.threads:  # one is left for the others there
            own = tuple(free[-worker.threads :])
            taken.update(own)
            placed[worker.name] = msgspec.structs.replace(worker, cores=own)
        else:
            placed[worker.name] = msgspec.structs.replace(worker, spin=False)
    for worker in workers:
        if worker.role != "pool" and worker.gpu and not worker.cores:
            shared = tuple(core for core in _near(worker, machine) if core not in taken)
            placed[worker.name] = msgspec.structs.replace(worker, cores=shared)
    return [placed.get(worker.name, worker) for worker in workers]


def _near(worker: WorkerPlan, machine: Machine) -> tuple[int, ...]:
    """The cores of its GPU's NUMA node; all of them where that is not known."""
    if worker.numa_node is None:
        return machine.cores
    return machine.node_cores.get(worker.numa_node, machine.cores)
