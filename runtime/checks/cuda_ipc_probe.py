"""`python -m runtime.checks.cuda_ipc_probe export|open`: tests whether GPU memory can be shared between two processes.

The first process allocates memory, writes a pattern, prints a reference, and keeps the memory until its standard input
ends. The second one reads the reference from standard input, opens the memory and compares the pattern.
"""

import sys

import msgspec
import numpy as np

from ipc.memory.device import CudaReference

_BYTES = 4096


def main(part: str) -> int:
    from ipc.memory.cuda import CudaMemory  # needs the extra [cuda]

    pattern = np.arange(_BYTES, dtype=np.uint8)
    if part == "export":
        memory = CudaMemory.create(_BYTES, "cuda:0")
        memory.write(0, pattern)
        memory.flush()
        sys.stdout.buffer.write(msgspec.json.encode(memory.reference) + b"\n")
        sys.stdout.flush()
        sys.stdin.read()
    else:
        reference = msgspec.json.decode(sys.stdin.buffer.readline(), type=CudaReference)
        memory = CudaMemory.open(reference, "cuda:0")
        content = np.zeros_like(pattern)
        memory.read(0, content)
        memory.flush()
        if not np.array_equal(content, pattern):
            print("the memory was opened, but its content differs", file=sys.stderr)
            return 1
    memory.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
