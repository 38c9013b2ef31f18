"""Tables of `trinity status` (a node's workers) and of `serve --dry-run` (the placement)."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runtime.checks.gpu_sharing import shared_gpus
from runtime.checks.memory_estimate import Need
from runtime.node.engine_config import OpenAiSection
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus, node_status

_COLOURS = {"ready": "green", "standby": "green", "fatal": "red", "backoff": "yellow"}
_COLUMNS = ("worker", "state", "pid", "device", "cores", "restarts", "heartbeat", "memory")
_NUMBERS = ("pid", "restarts", "heartbeat", "memory")
_WIDTH = 160  # of output to a file or pipe


def show_status(info: NodeInfo, console: Console) -> int:
    """Print the table; return exit code 0 if every worker is ready, else 1."""
    status = node_status(info)
    show_workers(status, console)
    return 0 if status.ready else 1


def show_workers(status: NodeStatus, console: Console) -> None:
    """Print the table, then the workers' notes."""
    if not console.is_terminal:
        console = Console(width=_WIDTH, file=console.file)
    info = status.info
    title = f"node {info.name!r}, pid {info.pid}, {info.url}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        table.add_column(
            name, justify="right" if name in _NUMBERS else "left", overflow="fold", no_wrap=name in ("worker", "state")
        )
    for worker in (*status.workers, *status.spares):
        table.add_row(*_cells(worker))
    console.print(table)
    for worker in (*status.workers, *status.spares):
        if worker.note:
            console.print(f"{worker.name}: {escape(worker.note)}", highlight=False)


def _cells(worker: WorkerStatus) -> tuple[str, ...]:
    colour = _COLOURS.get(worker.phase, "default")
    return (
        worker.name,
        f"[{colour}]{worker.phase}[/{colour}]",
        str(worker.pid or "–"),
        worker.device,
        core_ranges(worker.cores) or "any",
        str(worker.restarts),
        f"{worker.heartbeat_age_s:.1f} s",
        f"{worker.resident_bytes / 2**20:.0f} MiB",
    )


# ---- `trinity serve --dry-run`: placement of every process


_PLAN_COLUMNS = ("worker", "GPU", "UUID", "PCI bus", "NUMA", "cores", "spins", "needs", "free")


def show_placement(plan: NodePlan, machine: Machine, needs: Mapping[str, Need], console: Console | None = None) -> None:
    """Print the table: each process, its place, and the memory that it needs and that is free there."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH, file=console.file)
    table = Table(title=f"node {plan.config.node.name!r}" + (" (simulated GPUs)" if machine.simulated else ""))
    for column in _PLAN_COLUMNS:
        table.add_column(column, justify="right" if column in ("needs", "free") else "left", no_wrap=True)
    free = {gpu.uuid: gpu.free_bytes for gpu in machine.gpus}
    for worker in plan.processes:
        device = "" if machine.simulated or worker.only_embeds_on_gpu else worker.gpu
        need = needs.get(worker.name, Need(0))
        sizes = need.free(worker) + need.mapped, free.get(device, machine.free_bytes)
        table.add_row(*_where(worker, machine), *map(_mib, sizes))
    console.print(table)
    model = plan.config.model
    for url, role in model.described.items() if isinstance(model, OpenAiSection) else ():
        console.print(f"server {url}: {role}", highlight=False)
    for worker in plan.processes:
        if worker.only_embeds_on_gpu:
            size = _mib(needs.get(worker.name, Need(0)).gpu)
            console.print(f"{worker.name} embeds on GPU {worker.gpu_index}, in {size} of its memory", highlight=False)
    for line in shared_gpus(plan):
        console.print(
            f"{line}: without MPS they take turns of about 2 ms there, and a search or embedding waits for one or more"
        )


def _where(worker: WorkerPlan, machine: Machine) -> tuple[str, ...]:
    on_gpu = worker.gpu and not worker.only_embeds_on_gpu
    gpu = next((gpu for gpu in machine.gpus if on_gpu and gpu.uuid == worker.gpu), None)
    numa = "–" if gpu is None else "unknown" if worker.numa_node is None else str(worker.numa_node)
    spins = "–" if worker.role != "pool" else "yes" if worker.spin else "no"
    return (
        f"{worker.name} beside {worker.paired_with}" if worker.paired_with else worker.name,
        worker.device if gpu is None else gpu.index,
        "–" if gpu is None else gpu.uuid,
        "–" if gpu is None else gpu.pci_bus,
        numa,
        core_ranges(worker.cores) or "any",
        spins,
    )


def core_ranges(cores: tuple[int, ...]) -> str:
    """Format cores as the kernel does: "0-3,8"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
