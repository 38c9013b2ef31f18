"""Compiling the pool's policy and loop, whose machine code is built of the sources of three packages."""

from pathlib import Path

import gpu
import ipc
from ipc.memory.compiled import bound_to

compiled = bound_to(*(Path(str(package.__file__)).parent for package in (gpu, ipc)), Path(__file__).parent)
