"""What takes compilers seconds, made once for all processes and runs, until anything that it is made of changes."""

import fcntl
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

from gpu.cuda import compiler
from gpu.cuda.compiler import Usage

_FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "compiled"


def kept(make: Callable[[Path], object], *made_of: str) -> Path:
    """The folder that `make` fills, unless one of the same texts is there. What `make` raises is tried again."""
    folder = _FOLDER / hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@functools.cache
def compiled(source: str, arch: str) -> tuple[bytes, dict[str, Usage]]:
    """`gpu.cuda.compiler.compile_source`, kept."""

    def make(folder: Path) -> None:
        image, usage = compiler.compile_source(source, arch)
        (folder / "image").write_bytes(image)
        (folder / "usage").write_text(json.dumps(usage))

    by = (Path(compiler.__file__).read_text(), compiler.nvrtc_version(), importlib.metadata.version("cuda-core"))
    folder = kept(make, source, arch, *by)
    usage = json.loads((folder / "usage").read_text())
    return (folder / "image").read_bytes(), {kernel: Usage(*taken) for kernel, taken in usage.items()}
