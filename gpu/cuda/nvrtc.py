"""`python gpu/cuda/nvrtc.py ARCH LIBRARY CPU_LIMIT_S < SOURCE > IMAGE`: compile CUDA C++ in a process of its own.

NVRTC can neither be interrupted nor given a time limit, and some versions do not end for some sources. The process ends
with SIGPROF after CPU_LIMIT_S of processor time (a busy machine does not matter), and with its parent. LIBRARY is the
path of libnvrtc. Messages, and the assembler's report, go to stderr.

Run by its path, so that `gpu` and what it imports are not loaded.
"""

import ctypes
import io
import signal
import sys
from pathlib import Path

CPU_LIMIT_S = 120.0
"""Many times what a slow machine needs: the kernels take about 3 s, with the oldest version as with the newest."""
OPTIONS = {"std": "c++17", "fma": False, "ptxas_options": ["-v"]}
"""fma is off, so that results do not depend on the compiler: products are fused only by explicit fmaf."""
_PR_SET_PDEATHSIG = 1


def main(arch: str, library: str, limit_s: float) -> int:
    """Return the exit code: 1 after an error, whose message is on stderr."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends the process, in native code too
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for builtins in sorted(Path(library).parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins))  # opened by NVRTC by its name: 13.0 does not look beside itself
    ctypes.CDLL(library)  # the bindings use the loaded one
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    try:
        code = Program(sys.stdin.read(), "c++", ProgramOptions(arch=arch, **OPTIONS)).compile("cubin", logs=log)
    except Exception as error:
        sys.stderr.write(f"{error}\n{log.getvalue()}")
        return 1
    sys.stdout.buffer.write(bytes(code.code))
    sys.stderr.write(log.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
