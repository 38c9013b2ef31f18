"""What the kernels' machine code consists of: instructions, barriers, exchanges, by kernel and architecture.

    python -m benchmarks.sass [--nvdisasm PATH] [--arch sm_90 …] [--kernel gather_tasks …] [--against REVISION]

Compiles the kernels as an engine does (NVRTC, of the extra [cuda]) and reads the code back with nvdisasm, from the PATH
or the package nvidia-cuda-nvdisasm (`pip install --target DIR --no-deps nvidia-cuda-nvdisasm`, then --nvdisasm
DIR/nvidia/cu13/bin/nvdisasm). No GPU is needed. --against: the same of the kernels of a revision in git, beside it.

These are instructions that there are, not instructions that run: a loop's body counts once however often it runs, and
of two ways both count. What a block passes of barriers, the emulation counts (docs/gpu.md).
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.report import table
from gpu.cuda.compiler import compile_source, kernel_source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
KERNELS = ("gather_tasks", "merge_top_m")
_ROOT = Path(__file__).parent.parent
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+),")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_SOURCE = "import sys; from gpu.cuda.compiler import kernel_source; sys.stdout.write(kernel_source())"


class Counts(NamedTuple):
    """Of one kernel: instructions; among them barriers of a block, exchanges in a warp (shuffles, votes), accesses to
    shared memory, and to global memory."""

    instructions: int
    barriers: int
    exchanges: int
    shared: int
    device: int


def counts_of(listing: str) -> dict[str, Counts]:
    """What nvdisasm -c wrote, by kernel. What fills the code up behind a kernel's end is not counted."""
    opcodes: dict[str, Counter[str]] = {}
    kernel: Counter[str] | None = None
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            kernel = opcodes.setdefault(section[1], Counter())
        elif kernel is not None and (found := _INSTRUCTION.match(line)):
            kernel[found[1].partition(".")[0]] += 1
    return {name: _counts(found) for name, found in opcodes.items()}


def _counts(opcodes: Counter[str]) -> Counts:
    def of(*names: str) -> int:
        return sum(opcodes[name] for name in names)

    return Counts(
        opcodes.total() - of("NOP"),
        of("BAR", "UCGABAR_ARV", "UCGABAR_WAIT"),
        of("SHFL", "VOTE", "VOTEU", "MATCH", "REDUX"),
        of("LDS", "STS", "ATOMS", "LDSM", "LDGSTS"),
        of("LDG", "STG", "ATOMG", "ATOM", "RED", "REDG", "LD", "ST"),
    )


def disassemble(image: bytes, nvdisasm: str) -> str:
    """A cubin's listing. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        return subprocess.run([nvdisasm, "-c", file.name], check=True, capture_output=True, text=True).stdout


def source_at(revision: str) -> str:
    """The kernels' text of a revision, as its own code puts it together. Raises CalledProcessError."""
    archive = subprocess.run(["git", "archive", revision, "gpu"], cwd=_ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        command = [sys.executable, "-c", _SOURCE]
        return subprocess.run(
            command, cwd=folder, env={"PYTHONPATH": folder}, check=True, capture_output=True, text=True
        ).stdout


def find_nvdisasm() -> str | None:
    """nvdisasm of the PATH, or of its package."""
    beside = [str(path) for path in Path(entry).glob("nvidia/cu*/bin/nvdisasm")] if (entry := _site()) else []
    return shutil.which("nvdisasm") or next(iter(beside), None)


def _site() -> str | None:
    return next((entry for entry in sys.path if (Path(entry) / "nvidia").is_dir()), None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sass", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvdisasm", default=find_nvdisasm())
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--kernel", nargs="+", default=KERNELS)
    parser.add_argument("--against", metavar="REVISION")
    options = parser.parse_args(arguments)
    if options.nvdisasm is None:
        parser.error("nvdisasm is neither on the PATH nor installed (nvidia-cuda-nvdisasm)")
    sources = {"": kernel_source()}
    if options.against:
        named = subprocess.run(
            ["git", "rev-parse", "--short", options.against], cwd=_ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        sources = {f"{named}: ": source_at(named), "now: ": kernel_source()}
    rows: list[tuple[object, ...]] = []
    for arch in options.arch:
        counted = {
            when: counts_of(disassemble(compile_source(source, arch)[0], options.nvdisasm))
            for when, source in sources.items()
        }
        for kernel in options.kernel:
            rows += [(f"{when}{kernel}, {arch}", *found[kernel]) for when, found in counted.items()]
    print("\n".join(table(("kernel", *(name.replace("device", "global") for name in Counts._fields)), rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
