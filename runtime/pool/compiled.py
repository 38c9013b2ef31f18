"""Compilation of the pool's policy and loop, whose machine code depends on the sources of three packages."""

from pathlib import Path

import gpu
import ipc
from ipc.native.compiled import compiler_for

compiled = compiler_for(*(Path(str(package.__file__)).parent for package in (gpu, ipc)), Path(__file__).parent)
