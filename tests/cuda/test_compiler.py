"""The kernels compile for every architecture without a driver, within limits, and images are kept safely."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.cuda import compiler, layout
from gpu.cuda.compiler import Usage, compile_kernels, compile_source, kernel_source, usage_of
from gpu.errors import DeviceError, DeviceUnavailable
from tests.cuda.emulation import require_compiler
from tests.cuda.kept import compiled as kept_compiled

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# The most registers that a kernel may take on sm_80 and sm_90; nothing spills anywhere. A multiprocessor has 65,536:
# with 96 it runs 20 warps of merge_and_gather, a slot each; extend_fused has one block of 512 and 128 are its all,
# extend_resident two of 256, or four of 128.
REGISTERS = {
    "write_slots": 32,
    "compute_distances_8": 64,
    "compute_distances_16": 64,
    "compute_distances_32": 64,
    "merge_and_gather": 96,
    "extend_fused": 128,
    "extend_fused_near": 128,
    "extend_resident": 128,
}
REGISTERS_SM_100 = dict.fromkeys(REGISTERS, 128)  # nobody has tuned for it


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request: pytest.FixtureRequest) -> tuple[str, bytes, dict[str, Usage]]:
    return (request.param, *kept_compiled(kernel_source(), request.param))


def test_every_kernel_of_the_layout_is_compiled_and_no_other(compiled: tuple[str, bytes, dict[str, Usage]]) -> None:
    _, image, usage = compiled
    assert image[:4] == b"\x7fELF"
    assert set(usage) == {kernel.name for kernel in layout.KERNELS}


def test_kernels_stay_within_their_registers_and_shared_memory(
    compiled: tuple[str, bytes, dict[str, Usage]],
) -> None:
    arch, _, usage = compiled
    for name, registers in (REGISTERS_SM_100 if arch == "sm_100" else REGISTERS).items():
        assert usage[name].registers <= registers, f"{name} takes {usage[name].registers} registers on {arch}"
        assert usage[name].spill_bytes == 0, f"{name} spills {usage[name].spill_bytes} bytes on {arch}"
        assert usage[name].shared_bytes == 0  # all shared memory is dynamic: layout.BatchShape says how much


def test_a_report_with_spills_is_read_as_one() -> None:
    report = (
        "ptxas info    : Compiling entry function 'merge' for 'sm_90'\n"
        "ptxas         .     8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 56 registers, used 1 barriers, 8 bytes cumulative stack size, 96 bytes smem\n"
    )
    assert usage_of(report) == {"merge": Usage(registers=56, spill_bytes=16, stack_bytes=8, shared_bytes=96)}


def test_a_kernel_that_does_not_compile_is_named_with_its_line() -> None:
    broken = kernel_source().replace("const uint32 half = (count + 1) / 2;", "const uint32 half = nothing;")
    with pytest.raises(DeviceError, match=r"keys\.cuh\(\d+\): error: identifier \"nothing\" is undefined"):
        compile_source(broken, "sm_90")


def test_an_architecture_that_is_none_is_refused() -> None:
    with pytest.raises(DeviceError, match="'sm_90; rm' is invalid"):
        compile_source("", "sm_90; rm")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled, instead of compiling it."""
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
    monkeypatch.setattr(compiler, "kernel_source", lambda: "another text")
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 3"
    assert len(list((tmp_path / "cache").iterdir())) == 3  # and nothing half-written


def test_another_compiler_compiles_again(tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kernels("sm_90", tmp_path / "cache")
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "14.0")
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 2"


def test_a_disk_that_takes_no_image_costs_time_and_nothing_else(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 1"
    assert compile_kernels("sm_90", tmp_path / "cache") == b"sm_90 2"
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'trinity-runtime\[cuda\]'"):
        compile_source("", "sm_90")


def test_the_cache_is_this_user_s_alone(tmp_path: Path, counted: list[str]) -> None:
    compile_kernels("sm_90", tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    os.chmod(tmp_path / "cache", 0o777)
    with pytest.raises(DeviceError, match="is writable by other users"):
        compile_kernels("sm_90", tmp_path / "cache")


def test_every_header_is_in_the_source_once() -> None:
    source = kernel_source()
    assert not re.search("^#include", source, re.MULTILINE)
    for header in ("layout.cuh", *(path.name for path in compiler.KERNELS.glob("*.cu*"))):
        assert source.count(f'#line 1 "{header}"\n') == 1, header


def test_the_c_structs_are_the_records(tmp_path: Path) -> None:
    """The header asserts sizes and offsets; so a record that C lays out differently must fail here."""
    require_compiler()
    header = compiler.c_header()
    unit = tmp_path / "layout.cpp"
    check = ["g++", "-std=c++17", "-fsyntax-only", str(unit)]
    unit.write_text(header)
    subprocess.run(check, check=True, timeout=60)
    unit.write_text(header.replace("uint32 line_bytes;", "uint32 line_bytes, more;"))
    assert subprocess.run(check, capture_output=True, timeout=60).returncode


def test_records_are_whole_cache_lines_where_two_sides_write() -> None:
    for record in (layout.COLLECTION, layout.SLOT, layout.RESULT, layout.PROGRESS):
        assert record.itemsize == 64
