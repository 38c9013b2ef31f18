"""Tests of the kernel compiler: every architecture, without a driver; register limits; the image cache."""

import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gpu.cuda import compiler, layout
from gpu.cuda.block_copy import KERNEL, THREADS
from gpu.cuda.compiler import Usage, compile_kernels, compile_source, kernel_source, usage_of
from gpu.errors import DeviceError, DeviceUnavailable
from tests.cuda.build_cache import compiled as kept_compiled
from tests.cuda.emulation import require_compiler

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# Register limits of the kernels on sm_80 and sm_90; none may spill. A multiprocessor has 65,536 registers:
# with 96 it runs 20 warps of merge_and_gather, one slot each; extend_resident has two blocks of 256 threads, or four
# of 128, which 128 registers each fill.
REGISTERS = {
    "write_slots": 40,
    "compute_distances": 64,
    "merge_and_gather": 96,
    "extend_resident": 128,
}
REGISTERS_LATER = dict.fromkeys(REGISTERS, 128)  # on sm_100 and sm_120: not tuned


@pytest.fixture(scope="module")
def images() -> dict[str, tuple[bytes, dict[str, Usage]]]:
    """Image and usage by architecture: each compilation is a process, and they run on all cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        compiled = processes.map(partial(kept_compiled, kernel_source()), ARCHITECTURES)
        return dict(zip(ARCHITECTURES, compiled, strict=True))


@pytest.fixture(params=ARCHITECTURES)
def compiled(
    request: pytest.FixtureRequest, images: dict[str, tuple[bytes, dict[str, Usage]]]
) -> tuple[str, bytes, dict[str, Usage]]:
    return (request.param, *images[request.param])


def test_exactly_the_kernels_of_the_layout_are_compiled(compiled: tuple[str, bytes, dict[str, Usage]]) -> None:
    _, image, usage = compiled
    assert image[:4] == b"\x7fELF"
    assert set(usage) == {kernel.name for kernel in layout.KERNELS}


def test_kernels_stay_within_their_registers_and_shared_memory(
    compiled: tuple[str, bytes, dict[str, Usage]],
) -> None:
    arch, _, usage = compiled
    for name, registers in (REGISTERS if arch in ("sm_80", "sm_90") else REGISTERS_LATER).items():
        assert usage[name].registers <= registers, f"{name} takes {usage[name].registers} registers on {arch}"
        assert usage[name].spill_bytes == 0, f"{name} spills {usage[name].spill_bytes} bytes on {arch}"
        assert usage[name].shared_bytes == 0  # all shared memory is dynamic: see BatchShape


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_copy_of_kv_blocks_keeps_its_chunks_in_registers(arch: str) -> None:
    _, usage = kept_compiled(kernel_source(["copy.cu"]), arch)
    assert usage[KERNEL].spill_bytes == usage[KERNEL].stack_bytes == 0
    assert usage[KERNEL].registers * THREADS * 2 <= 65536, "beside the blocks of other kernels"


def test_register_spills_are_parsed_from_the_report() -> None:
    report = (
        "ptxas info    : Compiling entry function 'merge' for 'sm_90'\n"
        "ptxas         .     8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 56 registers, used 1 barriers, 8 bytes cumulative stack size, 96 bytes smem\n"
    )
    assert usage_of(report) == {"merge": Usage(registers=56, spill_bytes=16, stack_bytes=8, shared_bytes=96)}


def test_a_compile_error_is_one_line_that_names_the_compiler_the_place_and_the_remedy() -> None:
    broken = kernel_source().replace("const uint32 half = (count + 1) / 2;", "const uint32 half = nothing;")
    broken = broken.replace("uint32 position = 0;", "uint32 position = nowhere;")
    with pytest.raises(DeviceUnavailable) as raised:
        compile_source(broken, "sm_90")
    error = str(raised.value)
    assert re.search(r": keys\.cuh\(\d+\): error: identifier \"nowhere\" is undefined; ", error)
    assert f"with NVRTC {compiler.nvrtc_version()} ({compiler.nvrtc_path()}): " in error
    assert error.endswith(f"pip install '{compiler.TESTED}'")
    assert "\n" not in error
    assert "nothing" not in error  # the first error only


def test_a_compilation_that_does_not_end_is_stopped() -> None:
    with pytest.raises(DeviceUnavailable, match=r"NVRTC .*: no end after 0\.05 s of processor time; tested versions"):
        compile_source(kernel_source(), "sm_90", cpu_limit_s=0.05)


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "nvrtc_path", lambda: "/nowhere/libnvrtc.so.13")
    with pytest.raises(DeviceUnavailable, match=r"\(/nowhere/libnvrtc\.so\.13\): OSError: .*cannot open shared object"):
        compile_source("", "sm_90")


@pytest.mark.parametrize("name", ["sm_90; rm", "sm_99", "pentium", ""])
def test_an_unknown_architecture_is_rejected(name: str) -> None:
    with pytest.raises(DeviceError, match=rf"{name!r} is unknown to NVRTC 13\.\d+, which has .*sm_90, sm_100"):
        compile_source("", name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record compilations instead of compiling."""
    texts: list[str] = []

    def note(source: str, arch: str) -> tuple[bytes, dict[str, Usage]]:
        texts.append(source)
        return f"{arch} {len(texts)}".encode(), {}

    monkeypatch.setattr(compiler, "compile_source", note)
    return texts


def test_an_image_is_compiled_once_for_each_source_and_architecture(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 1"
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 1"
    assert compile_kernels("sm_80", tmp_path / "cache") == b"sm_80 2"
    monkeypatch.setattr(compiler, "kernel_source", lambda units: "another text")
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 3"
    assert len(list((tmp_path / "cache").iterdir())) == 3  # and no partial files


def test_a_full_disk_only_disables_the_image_cache(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 1"
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 2"
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'trinity-runtime\[cuda\]'"):
        compile_source("", "sm_90")


def test_the_cache_directory_is_private_to_the_user(tmp_path: Path, counted: list[str]) -> None:
    compile_kernels("sm_90", tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    os.chmod(tmp_path / "cache", 0o777)
    with pytest.raises(DeviceError, match="is writable by other users"):
        compile_kernels("sm_90", tmp_path / "cache")


def test_the_c_structs_match_the_records(tmp_path: Path) -> None:
    """The header asserts sizes, so a different layout in C fails to compile here."""
    require_compiler()
    header = compiler.c_header()
    unit = tmp_path / "layout.cpp"
    check = ["g++", "-std=c++17", "-fsyntax-only", str(unit)]
    unit.write_text(header)
    subprocess.run(check, check=True, timeout=60)
    unit.write_text(header.replace("uint32 line_bytes;", "uint32 line_bytes, more;"))
    assert subprocess.run(check, capture_output=True, timeout=60).returncode


def test_a_padded_record_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [("extends", np.uint32), ("slot", np.uint64)]
    monkeypatch.setattr(layout, "RECORD", np.dtype(fields, align=True))
    with pytest.raises(AssertionError, match="Record is padded"):
        compiler.c_header()


def test_ci_compiles_with_the_oldest_version_that_the_extra_allows_and_the_newest_that_an_error_names() -> None:
    root = Path(__file__).parents[2]
    ends = (root / "tests/cuda/oldest.txt", root / "launchers/constraints.txt")
    oldest, newest = (re.search(r"^nvidia-cuda-nvrtc==(\S+)$", end.read_text(), re.MULTILINE) for end in ends)
    assert oldest is not None
    assert newest is not None
    assert f"nvidia-cuda-nvrtc>={oldest[1]},<={newest[1]}" == compiler.TESTED
    assert f'"nvidia-cuda-nvrtc>={oldest[1]}; ' in (root / "pyproject.toml").read_text()
