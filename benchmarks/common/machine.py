"""Description of the machine that a benchmark runs on."""

import os
import platform
from pathlib import Path


def machine() -> dict[str, str]:
    """Return processor, cores, system and Python version."""
    model = next(
        (line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")), platform.processor()
    )
    cores = sum(line.startswith("processor") for line in _cpu_lines())
    return {"processor": model, "cores": str(cores), "system": platform.platform(), "python": platform.python_version()}


def machine_load() -> str:
    """Return the load average as text."""
    one, five, _ = os.getloadavg()
    return f"load average {one:.1f} (1 min), {five:.1f} (5 min) on {os.cpu_count()} cores"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
