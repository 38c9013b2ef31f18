"""Searches and embedding on a GPU that other workers use, and NVIDIA's Multi-Process Service (MPS), which ends that
they take turns."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from runtime.checks.finding import Finding
from runtime.node.placement.plan import CPU, NodePlan

_DAEMON = "nvidia-cuda-mps"  # names of processes are cut after 15 characters
_ADVICE = "run nvidia-cuda-mps-control -d before the node starts, as its user, or give it a GPU of its own: docs/gpu.md"


def shared_gpus(plan: NodePlan) -> Iterator[str]:
    """Yield a line for every pool worker, and every worker on the CPU that embeds on a GPU, that shares this GPU with
    other workers of the node."""
    for worker in plan.workers:
        others = [other.name for other in plan.workers if worker.shares_gpu_with(other)]
        searches = worker.role == "pool" and worker.device != CPU  # a simulated GPU is a CPU
        if others and (searches or worker.only_embeds_on_gpu):
            yield f"{worker.name} shares GPU {worker.gpu_index} with {', '.join(others)}"


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
    """Yield a finding for every worker that searches or embeds on a shared GPU."""
    missing = mps_state()
    for line in shared_gpus(plan):
        subject, _, rest = line.partition(" shares ")
        text = f"shares {rest}; " + (
            f"{missing}: processes take turns of about 2 ms, and each launch of a search or embedding waits for one"
            if missing
            else "MPS runs"
        )
        yield Finding.of(not missing, f"{subject} GPU", text, _ADVICE)
