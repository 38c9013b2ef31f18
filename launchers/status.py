"""`trinity status`: a node's workers as a table."""

from rich.console import Console
from rich.table import Table

from runtime.node.control import node_status
from runtime.node.run_dir import NodeInfo

_COLOURS = {"ready": "green", "fatal": "red", "backoff": "yellow"}


def show_status(info: NodeInfo, console: Console) -> int:
    """Print the table; the exit code is 0 if every worker is ready."""
    status = node_status(info)
    table = Table(title=f"node {info.name!r}, pid {info.pid}, {info.url}")
    for column in ("worker", "state", "pid", "device", "cores", "restarts", "heartbeat", "memory"):
        table.add_column(column, justify="right" if column in ("pid", "restarts", "heartbeat", "memory") else "left")
    for worker in status.workers:
        colour = _COLOURS.get(worker.phase, "default")
        table.add_row(
            worker.name,
            f"[{colour}]{worker.phase}[/{colour}]",
            str(worker.pid or "–"),
            worker.device,
            ",".join(map(str, worker.cores)) or "any",
            str(worker.restarts),
            f"{worker.heartbeat_age_s:.1f} s",
            f"{worker.resident_bytes / 2**20:.0f} MiB",
        )
    console.print(table)
    return 0 if status.ready else 1
