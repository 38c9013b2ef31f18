"""The kernels' machine code: compiled for one architecture with NVRTC, which needs no driver, and kept on disk.

A cached image is named after everything that it depends on: the source text, the layout, the architecture, the options
and NVRTC's version. It appears whole or not at all, in a directory that no other user can write to.
"""

import hashlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu.cuda import layout
from gpu.errors import DeviceError, DeviceUnavailable

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
UNITS = ("staged.cu", "fused.cu", "resident.cu")
_STRUCTS = ("Collection", "Slot", "Counters", "Result", "Progress", "Record", "Queue", "Command", "Batch")
_CONSTANTS = (
    "FREE",
    "ACTIVE",
    "PAUSED",
    "FINISHED",
    "F32_L2",
    "F32_DOT",
    "F16_L2",
    "F16_DOT",
    "I8_L2",
    "I8_DOT",
    "MERGE_THREADS",
    "DISTANCE_THREADS",
    "FUSED_THREADS",
    "RESIDENT_THREADS",
    "RESIDENT_VISITED_BITS",
    "SLOT_BITS",
    "RINGS",
    "PREFILL_RING",
    "DECODE_RING",
    "IS_NEW",
    "IS_DONE",
    "LAP_SHIFT",
    "MAX_LAP",
    "EVERY_DECODE",
    "WRITE_THREADS",
    "CHUNK_BYTES",
    "MERGE_KEYS",
    "SCRATCH_BYTES",
    "TASK_BITS",
    "TASK_MASK",
    "CODE_STEP",
    "MAX_SEARCH_WIDTH",
)
"""Of gpu.cuda.layout, by their names there, which for the structs are in capitals."""
_C_TYPES = {"u4": "uint32", "u8": "uint64"}
_INCLUDE = re.compile(r'^#include "([a-z_]+\.cuh)"$', re.MULTILINE)
_ARCH = re.compile(r"sm_\d{2,3}[af]?\Z")
_OPTIONS = {"std": "c++17", "fma": False, "ptxas_options": ["-v"]}
"""No fused products but those the source asks for: what is computed does not depend on the compiler's taste."""


class Usage(NamedTuple):
    """What a kernel takes of a multiprocessor, as the assembler reports it."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def kernel_source() -> str:
    """All kernels as one text without includes, each header once; the layout's C mirror is "layout.cuh"."""
    seen: set[str] = set()

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = c_header() if name == "layout.cuh" else (KERNELS / name).read_text()
        pieces, line, position = [f'#line 1 "{name}"\n'], 1, 0
        for include in _INCLUDE.finditer(text):
            pieces.append(text[position : include.start()])
            line += pieces[-1].count("\n")
            pieces.append(f'{text_of(include[1])}\n#line {line} "{name}"\n')
            position = include.end()
        return "".join((*pieces, text[position:])).replace("#pragma once\n", "\n")

    return "".join(map(text_of, UNITS))


def c_header() -> str:
    """The records and constants in C, with the sizes and offsets that they have here asserted."""
    lines = ["// Written by gpu/cuda/compiler.py.", "#pragma once"]
    lines += ["using uint32 = unsigned int;", "using uint64 = unsigned long long;"]
    lines += [f"constexpr uint32 {name} = {getattr(layout, name)};" for name in _CONSTANTS]
    for name in _STRUCTS:
        dtype: np.dtype[Any] = getattr(layout, name.upper())
        lines.append(f"struct {name} {{")
        for field in dtype.names or ():
            part, offset = dtype.fields[field][:2]  # type: ignore[index]
            count = f"[{part.shape[0]}]" if part.shape else ""
            lines.append(f"    {_C_TYPES[part.base.str[1:]]} {field}{count};  // {offset}")
        lines += ["};", f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");']
        lines += [
            f'static_assert(__builtin_offsetof({name}, {field}) == {dtype.fields[field][1]}, "{name}.{field}");'  # type: ignore[index]
            for field in dtype.names or ()
        ]
    return "\n".join(lines) + "\n"


def compile_kernels(arch: str, cache: Path | None = None) -> bytes:
    """A cubin of all kernels for an architecture such as "sm_90", from the cache where it is there.

    cache: a directory for images; by default `trinity/kernels` in the user's cache.
    Raises DeviceUnavailable without the extra [cuda]; DeviceError with the compiler's messages.
    """
    source = kernel_source()
    directory = _private_directory(default_cache() if cache is None else cache)
    path = directory / f"{arch}-{_digest(source, arch)}.cubin"
    if path.is_file():
        return path.read_bytes()
    image, _ = compile_source(source, arch)
    handle, temporary = tempfile.mkstemp(dir=directory, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(image)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # a full disk, say: the image is there all the same
        os.unlink(temporary)
    return image


def compile_source(source: str, arch: str) -> tuple[bytes, dict[str, Usage]]:
    """Compile a text → the cubin, and what its kernels take. Raises as `compile_kernels` does."""
    if not _ARCH.match(arch):
        raise DeviceError(f"architecture {arch!r} is not of the form sm_90")
    nvrtc_version()
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    try:
        code = Program(source, "c++", ProgramOptions(arch=arch, **_OPTIONS)).compile("cubin", logs=log)
    except Exception as error:
        raise DeviceError(f"the kernels do not compile for {arch}: {error}\n{log.getvalue()}") from None
    return bytes(code.code), usage_of(log.getvalue())


def usage_of(report: str) -> dict[str, Usage]:
    """The kernels' resources from the assembler's report (ptxas -v)."""
    found = {}
    for part in report.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        numbers = {
            key: int(number) for number, key in re.findall(r"(\d+) (?:bytes )?(registers|stack frame|smem)", part)
        }
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        found[name] = Usage(numbers["registers"], spills, numbers.get("stack frame", 0), numbers.get("smem", 0))
    return found


def nvrtc_version() -> str:
    """The compiler's version. Raises DeviceUnavailable where there is none."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise DeviceUnavailable(
            f"compiling kernels needs the extra [cuda] ({error}): pip install 'trinity-runtime[cuda]'"
        ) from None
    return f"{major}.{minor}"


def default_cache() -> Path:
    """Where images are kept: `trinity/kernels` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trinity" / "kernels"


def _digest(source: str, arch: str) -> str:
    parts = (source, arch, repr(sorted(_OPTIONS.items())), nvrtc_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _private_directory(directory: Path) -> Path:
    """The directory, made if need be. Code is loaded from it, so it must be this user's alone to write to."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise DeviceError(f"{directory} can be written by other users: kernels will not be loaded from it")
    return directory
