"""The benchmark on a processor that has AVX-512 as on one that has not: `--no-avx512`.

Nothing hides an instruction from a process, so each library is told in its own way, before it is loaded:

- numba (this engine) compiles for the features that NUMBA_CPU_FEATURES names: the processor's own less these;
- numpy's matrix products, of builds, follow OPENBLAS_CORETYPE;
- rabitqlib asks two functions of its own which of its kernels to use. They are called through the linker's table, so a
  library that is loaded before it (LD_PRELOAD) answers in their stead; its AVX2 kernels are used then;
- of the other peers nothing is known that reaches all of their kernels: they are left out.
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
    """Whether this process was begun by `mask_avx512`."""
    return _SET in os.environ


def mask_avx512(module: str) -> None:
    """Begin this process anew without AVX-512, unless it was. Needs a C++ compiler."""
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
