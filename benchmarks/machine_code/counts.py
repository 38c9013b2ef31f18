"""Instruction counts of the kernels' machine code, static or executed: instructions, barriers, shuffles.

    python -m benchmarks.machine_code [--executed] [--nvdisasm PATH] [--arch sm_90 …] [--kernel NAME …]
                                      [--against REVISION]

Compiles the kernels like an engine (NVRTC, extra [cuda]) and disassembles the code with nvdisasm, from the PATH or the
package nvidia-cuda-nvdisasm (extra [test]). No GPU is needed. --against: compare with the kernels of a git revision.

Static counts: a loop's body counts once, and both branches of a condition count.
--executed: instead, the instructions that a slot's block executes in an extend of a typical search, over all warps: the
code is interpreted on the CPU (`interpreter`; sm_90 only), with the same searches for both revisions. For
extend_fused_near, with blocks of 128 threads, this covers the whole extend.
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.common.report import table
from benchmarks.gpu_check.synthetic import random_set
from benchmarks.machine_code.executed import ARCHITECTURE, SLOTS
from gpu import GraphIndex
from gpu.cuda.compiler import compile_source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
KERNELS = ("gather_tasks", "merge_top_m", "merge_and_gather")
"""The merge and gather kernels, by their names in several revisions."""
BLOCK_KERNEL = "extend_fused_near"
_ROOT = Path(__file__).parents[2]
_ROWS, _DIM = 3000, 32
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+),")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_SOURCE = "import sys; from gpu.cuda.compiler import kernel_source; sys.stdout.write(kernel_source())"


class Counts(NamedTuple):
    """Counts of one kernel: all instructions, block barriers, warp exchanges (shuffles, votes), accesses to shared and
    to global memory."""

    instructions: int
    barriers: int
    exchanges: int
    shared: int
    device: int


def counts_of(listing: str) -> dict[str, Counts]:
    """Count the instructions of nvdisasm -c's output, by kernel, without the padding at a kernel's end."""
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
    """Disassemble a cubin. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        return subprocess.run([nvdisasm, "-c", file.name], check=True, capture_output=True, text=True).stdout


@contextmanager
def tree_at(revision: str | None) -> Iterator[Path]:
    """Extract the kernels and their tests of a git revision to a folder; None: use the checkout."""
    if revision is None:
        yield _ROOT
        return
    command = ["git", "archive", revision, "gpu", "tests"]
    archive = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)


def listing_of(tree: Path, arch: str, nvdisasm: str) -> str:
    """Compile a tree's kernels and disassemble them. Raises CalledProcessError."""
    return disassemble(compile_source(_run(tree, "-c", _SOURCE), arch)[0], nvdisasm)


def _run(tree: Path, *arguments: str) -> str:
    """Run Python in a tree, with the checkout's benchmarks. Returns its output."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{_ROOT}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def executed(
    tree: Path, listing: str, index: Path, top_m: int, form: str = "stages"
) -> tuple[dict[str, list[float]], str]:
    """Return, by kernel of a form (stages, block), the counts executed by a slot's block in an extend; and the results.

    Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile("w", suffix=".sass") as file:
        file.write(listing)
        file.flush()
        arguments = ("-m", "benchmarks.machine_code.executed", file.name, str(index), str(top_m), form)
        *lines, found = _run(tree, *arguments).splitlines()
    sums: dict[str, Counter[str]] = {}
    extends: Counter[str] = Counter()
    for line in lines:
        kernel, opcodes, barriers, of_slots = json.loads(line)
        sums.setdefault(kernel, Counter()).update({**opcodes, "BAR": barriers})
        extends[kernel] += of_slots
    return {kernel: [count / extends[kernel] for count in _counts(total)] for kernel, total in sums.items()}, found


def usual_index(path: Path, dims: int = _DIM) -> None:
    """Write clustered integer vectors, whose sums are exact, with a graph of degree 32, and queries."""
    data = random_set(_ROWS, dims, SLOTS, seed=0)
    base, queries = (np.round(4 * vectors).astype(np.float32) for vectors in (data.base, data.queries))
    index = GraphIndex.build(base, metric="l2", degree=32).data
    np.savez(path, base=base, graph=index.graph, seeds=index.seeds, queries=queries)


def find_nvdisasm() -> str | None:
    """Find nvdisasm on the PATH or in its package."""
    beside = [str(path) for path in Path(entry).glob("nvidia/cu*/bin/nvdisasm")] if (entry := _site()) else []
    return shutil.which("nvdisasm") or next(iter(beside), None)


def _site() -> str | None:
    return next((entry for entry in sys.path if (Path(entry) / "nvidia").is_dir()), None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine_code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nvdisasm", default=find_nvdisasm())
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--kernel", nargs="+", default=KERNELS)
    parser.add_argument("--against", metavar="REVISION")
    parser.add_argument("--executed", action="store_true")
    parser.add_argument("--top-m", type=int, default=64)
    parser.add_argument("--dims", type=int, default=_DIM)
    options = parser.parse_args(arguments)
    if options.executed:
        options.arch = (ARCHITECTURE,)
    if options.nvdisasm is None:
        parser.error("nvdisasm is neither on the PATH nor installed (nvidia-cuda-nvdisasm)")
    revisions: dict[str, str | None] = {"": None}
    if options.against:
        command = ["git", "rev-parse", "--short", options.against]
        named = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()
        revisions = {f"{named}: ": named, "now: ": None}
    rows: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index.npz"
        if options.executed:
            usual_index(index, options.dims)
        for arch in options.arch:
            counted: dict[str, dict[str, Sequence[object]]] = {}
            answers = set()
            for when, revision in revisions.items():
                with tree_at(revision) as tree:
                    listing = listing_of(tree, arch, options.nvdisasm)
                    counted[when] = dict(counts_of(listing))
                    if options.executed:
                        form = "block" if BLOCK_KERNEL in options.kernel else "stages"
                        found, answer = executed(tree, listing, index, options.top_m, form)
                        counted[when] = {name: [f"{one:,.1f}" for one in line] for name, line in found.items()}
                        answers.add(answer)
            assert len(answers) < 2, f"revisions have different results: {answers}"
            for kernel in options.kernel:
                rows += [
                    (f"{when}{kernel}, {arch}", *found[kernel]) for when, found in counted.items() if kernel in found
                ]
    print("\n".join(table(("kernel", *(name.replace("device", "global") for name in Counts._fields)), rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
