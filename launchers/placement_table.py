"""`trinity serve --dry-run`: where every process would run, and whether it fits."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import NodePlan, WorkerPlan

_COLUMNS = ("worker", "GPU", "UUID", "PCI bus", "NUMA", "cores", "spins", "needs", "free")
_WIDTH = 160  # where no terminal has another: a file, a pipe


def show_placement(plan: NodePlan, machine: Machine, needed: Mapping[str, int], console: Console | None = None) -> bool:
    """Print the table. False if something does not fit into the memory that is free."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH, file=console.file)
    table = Table(title=f"node {plan.config.node.name!r}" + (" (simulated GPUs)" if machine.simulated else ""))
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in ("needs", "free") else "left", no_wrap=True)
    left = _free(machine)
    fits = True
    for worker in plan.processes:
        place = "" if machine.simulated else worker.gpu
        needs, free = needed.get(worker.name, 0), left[place]
        left[place] = free - needs
        fits = fits and needs <= free
        colour = "red" if needs > free else "default"
        table.add_row(*_where(worker, machine), f"[{colour}]{_mib(needs)}[/{colour}]", _mib(max(0, free)))
    console.print(table)
    if not fits:
        console.print("[red]what needs more than is free cannot run (free is what the rows above leave)[/red]")
    return fits


def _where(worker: WorkerPlan, machine: Machine) -> tuple[str, ...]:
    gpu = next((gpu for gpu in machine.gpus if gpu.uuid == worker.gpu), None)
    numa = "–" if gpu is None else "unknown" if worker.numa_node is None else str(worker.numa_node)
    spins = "–" if worker.role != "pool" else "yes" if worker.spin else "no"
    return (
        worker.name,
        worker.device if gpu is None else gpu.index,
        "–" if gpu is None else gpu.uuid,
        "–" if gpu is None else gpu.pci_bus,
        numa,
        core_ranges(worker.cores) or "any",
        spins,
    )


def _free(machine: Machine) -> dict[str, int]:
    """Free bytes by GPU; under "" the machine's own, which is also what simulated GPUs have."""
    return {gpu.uuid: gpu.free_bytes for gpu in machine.gpus} | {"": machine.free_bytes}


def core_ranges(cores: tuple[int, ...]) -> str:
    """Cores as the kernel writes them: "0-3,8"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
