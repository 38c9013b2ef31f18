"""Pool workers that share a GPU with other workers, and NVIDIA's Multi-Process Service (MPS), which ends their taking
turns."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from runtime.checks.finding import Finding
from runtime.node.placement.plan import CPU, NodePlan

_DAEMON = "nvidia-cuda-mps"  # names of processes are cut after 15 characters
_ADVICE = (
    "run nvidia-cuda-mps-control -d before the node starts, as its user, or give the pool a GPU of its own: docs/gpu.md"
)


def shared_gpus(plan: NodePlan) -> Iterator[str]:
    """Yield a line for every pool worker that shares its GPU with other workers of the node."""
    for pool in plan.of_role("pool"):
        others = [other.name for other in plan.workers if pool.shares_gpu_with(other)]
        if others and pool.device != CPU:  # a simulated GPU is a CPU
            yield f"{pool.name} shares GPU {pool.gpu_index} with {', '.join(others)}"


def mps_state(directory: Path | None = None, processes: frozenset[str] | None = None) -> str:
    """Return "" if MPS serves this process's environment, else what is missing.

    `directory`: its pipes, by default where the driver looks. `processes`: names of running processes, for tests.
    """
    directory = directory or Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    if processes is None:
        processes = frozenset(str(process.info["name"]) for process in psutil.process_iter(["name"]))
    control = directory / "control"
    daemon = any(name.startswith(_DAEMON) for name in processes)
    if control.exists():
        return "" if daemon else f"{control} exists, but no MPS daemon is visible: left over, or outside this container"
    if daemon:
        return f"an MPS daemon runs, but {control} does not exist: set CUDA_MPS_PIPE_DIRECTORY to its directory"
    return "MPS does not run"


def findings(plan: NodePlan) -> Iterator[Finding]:
    """Yield a finding for every pool worker on a shared GPU."""
    missing = mps_state()
    for line in shared_gpus(plan):
        subject, _, rest = line.partition(" shares ")
        text = f"shares {rest}; " + (
            f"{missing}: processes take turns of about 2 ms, and each launch of a search waits for one"
            if missing
            else "MPS runs"
        )
        yield Finding.of(not missing, f"{subject} GPU", text, _ADVICE)
