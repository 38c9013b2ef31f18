"""Disabling AVX-512 for the benchmark: `--no-avx512`.

The CPU cannot hide instructions from a process, so each library is configured separately before it is loaded:

- numba (this engine) compiles for NUMBA_CPU_FEATURES: the processor's features without AVX-512;
- numpy's matrix products, used by builds, follow OPENBLAS_CORETYPE;
- rabitqlib selects its kernels with two functions. They are called through the PLT, so a preloaded library (LD_PRELOAD)
  overrides them to select its AVX2 kernels;
- the other peers have no known way to disable all of their AVX-512 kernels: they are skipped.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import llvmlite.binding as llvm

MASKED_PEERS = ("rabitqlib",)
_HIDDEN = ("avx512", "avx10", "amx", "evex512")
_SET = "TRINITY_BENCHMARK_NO_AVX512"  # the directory of the library
_ANSWERS = """
namespace rabitqlib::cpu {
bool has_avx512_core() { return false; }
bool has_avx512_popcnt() { return false; }
}
"""


def is_masked() -> bool:
    """Return whether this process was started by `mask_avx512`."""
    return _SET in os.environ


def mask_avx512(module: str) -> None:
    """Restart this process without AVX-512, unless already done. Needs a C++ compiler."""
    if is_masked():
        atexit.register(shutil.rmtree, os.environ[_SET], ignore_errors=True)
        return
    folder = Path(tempfile.mkdtemp())
    library = folder / "no-avx512.so"
    (folder / "no-avx512.cpp").write_text(_ANSWERS)
    subprocess.run(["c++", "-shared", "-fPIC", "-O1", "-o", library, folder / "no-avx512.cpp"], check=True)
    features = {name: on and not name.startswith(_HIDDEN) for name, on in llvm.get_host_cpu_features().items()}
    environment = {
        "LD_PRELOAD": str(library),
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": ",".join(f"{'+' if on else '-'}{name}" for name, on in features.items()),
        "OPENBLAS_CORETYPE": "Haswell",
        _SET: str(folder),
    }
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | environment)
