"""Memory near a GPU: the kernel's policy for where a process's pages go."""

import ctypes

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_MAX_NODE = 64


def prefer_memory_of(node: int, machine: str) -> bool:
    """Have this process's new pages come from a NUMA node while it has some. False if the kernel does not let us."""
    number = _SET_MEMPOLICY.get(machine)
    if number is None or not 0 <= node < _MAX_NODE:
        return False
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(number, _MPOL_PREFERRED, ctypes.byref(mask), ctypes.c_ulong(_MAX_NODE + 1))) == 0
