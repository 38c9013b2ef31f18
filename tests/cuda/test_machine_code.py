"""Tests of the machine-code tools: counting the instructions of a listing and of compiled kernels, and emulation."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.machine_code.arithmetic import Arithmetic
from benchmarks.machine_code.counts import Counts, counts_of, executed, find_nvdisasm, listing_of, main, usual_index
from benchmarks.machine_code.interpreter import Memory
from benchmarks.machine_code.listing import kernels_of
from gpu import GraphIndex
from gpu.index.data import IndexData
from gpu.index.rows import Dtype, encode
from tests.cuda.build_cache import compiled

ROOT = Path(__file__).parents[2]
LISTING = """
	.section	.text.merge_and_gather,"ax",@progbits
.text.merge_and_gather:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E R0, desc[UR12][R90.64] ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   MEMBAR.SC.GPU ;
.L_x_0:
        /*0040*/            @!UPT1 SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;
        /*0050*/               @P1 STS.64 [R3], R4 ;
        /*0060*/                   BRA `(.L_x_0);
        /*0070*/                   NOP;
	.section	.text.write_slots,"ax",@progbits
        /*0000*/                   EXIT ;
"""


def test_instructions_are_counted_by_kernel_and_kind_regardless_of_predicates() -> None:
    assert counts_of(LISTING) == {
        "merge_and_gather": Counts(instructions=7, barriers=1, exchanges=1, shared=1, device=1),
        "write_slots": Counts(1, 0, 0, 0, 0),
    }


# The first three threads double their number while the others wait; then each thread of a warp passes its number to
# a neighbour, and the block synchronises.
PROGRAM = """
	.section	.text.double_some,"ax",@progbits
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDC.64 R4, c[0x0][0x210] ;
        /*0020*/                   ISETP.GE.U32.AND P0, PT, R0, 0x3, PT ;
        /*0030*/                   BSSY B0, `(.L_x_1) ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   IMAD.SHL.U32 R0, R0, 0x2, RZ ;
.L_x_0:
        /*0060*/                   BSYNC B0 ;
.L_x_1:
        /*0070*/                   SHFL.BFLY PT, R1, R0, 0x1, 0x1f ;
        /*0080*/                   S2R R2, SR_TID.X ;
        /*0090*/                   IMAD.WIDE.U32 R4, R2, 0x4, R4 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/                   STG.E desc[UR6][R4.64], R1 ;
        /*00c0*/                   EXIT ;
"""


def test_diverged_lanes_reconverge_and_execution_is_counted_per_warp() -> None:
    memory = Memory(1024)
    address = memory.allocate(256)
    machine = Arithmetic(kernels_of(PROGRAM), memory, 0x210)
    counted = machine.launch("double_some", 1, 64, address.to_bytes(8, "little"), 0)
    numbers = np.arange(64)
    doubled = np.where(numbers < 3, 2 * numbers, numbers)
    assert memory.view(address, 256).view(np.uint32).tolist() == doubled.reshape(-1, 2)[:, ::-1].reshape(-1).tolist()
    assert (counted.barriers, counted.opcodes["IMAD"], counted.opcodes["BSYNC"]) == (
        1,
        3,
        2,
    )  # one warp does the doubling


def test_an_unknown_instruction_is_named() -> None:
    machine = Arithmetic(kernels_of(PROGRAM.replace("S2R R2, SR_TID.X", "TEX R2")), Memory(1024), 0x210)
    with pytest.raises(NotImplementedError, match="TEX R2"):
        machine.launch("double_some", 1, 32, bytes(8), 0)


@pytest.fixture(scope="module")
def listing() -> str:
    """Return the listing of this checkout's kernels (compilation is cached)."""
    if (nvdisasm := find_nvdisasm()) is None:
        pytest.skip("nvdisasm is not installed (nvidia-cuda-nvdisasm)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.machine_code.counts.compile_source", compiled)
        return listing_of(ROOT, "sm_90", nvdisasm)


@pytest.mark.parametrize(
    ("form", "dtype", "kernels"),
    [("stages", "float32", {"merge_and_gather"}), ("block", "float16", {"extend_fused_near"})],
)
def test_the_emulated_machine_code_returns_the_index_s_results(
    form: str, dtype: Dtype, kernels: set[str], listing: str, tmp_path: Path
) -> None:
    usual_index(tmp_path / "index.npz")
    counted, found = executed(ROOT, listing, tmp_path / "index.npz", 32, form)
    with np.load(tmp_path / "index.npz") as stored:
        data = IndexData(encode(stored["base"], "l2", dtype), stored["graph"], stored["seeds"], None)
        ids, distances = GraphIndex(data).search(stored["queries"], 10, 32, 4)
    answers = [[ids[slot].tolist(), distances[slot].tolist()] for slot in range(len(ids))]
    assert json.loads(found)
    assert all(answer[:2] in answers for answer in json.loads(found))
    assert set(counted) == kernels


def test_instructions_of_the_compiled_kernels_are_counted(
    listing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = {(ROOT, "sm_90", find_nvdisasm()): listing}
    monkeypatch.setattr("benchmarks.machine_code.counts.listing_of", lambda *key: compiled[key])
    assert main(["--arch", "sm_90"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["merge_and_gather, sm_90"]
    assert all(int(number) > 0 for row in rows for number in row[1:])
