"""Cache of compiled programs, shared by all processes, runs and checkouts; the key is a hash of everything compiled."""

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

from gpu.cuda import compiler, nvrtc
from gpu.cuda.compiler import Usage

_CPU_LIMIT_S = 20.0
"""Of a compilation, in processor time: the longest that an architecture may take. The kernels take about 3 s."""
_FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trinity" / "tests"


def build_once(make: Callable[[Path], object], *sources: str) -> Path:
    """Return the folder of these sources; `make` fills it unless it is complete, and is retried after an exception."""
    folder = _FOLDER / hashlib.sha256("\0".join(sources).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@functools.cache
def compiled(source: str, arch: str) -> tuple[bytes, dict[str, Usage]]:
    """Return the cached result of `gpu.cuda.compiler.compile_source`."""

    def make(folder: Path) -> None:
        image, usage = compiler.compile_source(source, arch, _CPU_LIMIT_S)
        (folder / "image").write_bytes(image)
        (folder / "usage").write_text(json.dumps(usage))

    code = (Path(file).read_text() for file in (compiler.__file__, nvrtc.__file__))
    tools = (*code, compiler.nvrtc_version(), importlib.metadata.version("cuda-core"))
    folder = build_once(make, source, arch, *tools)
    usage = json.loads((folder / "usage").read_text())
    return (folder / "image").read_bytes(), {kernel: Usage(*taken) for kernel, taken in usage.items()}
