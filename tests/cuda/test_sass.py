"""Counting the instructions of a listing, and of the kernels as they are compiled."""

import pytest

from benchmarks.sass import Counts, counts_of, find_nvdisasm, main

LISTING = """
	.section	.text.merge_top_m,"ax",@progbits
.text.merge_top_m:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E R0, desc[UR12][R90.64] ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   MEMBAR.SC.GPU ;
.L_x_0:
        /*0040*/            @!UPT1 SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;
        /*0050*/               @P1 STS.64 [R3], R4 ;
        /*0060*/                   BRA `(.L_x_0);
        /*0070*/                   NOP;
	.section	.text.gather_tasks,"ax",@progbits
        /*0000*/                   EXIT ;
"""


def test_instructions_are_counted_by_kernel_and_kind_whatever_predicates_them() -> None:
    assert counts_of(LISTING) == {
        "merge_top_m": Counts(instructions=7, barriers=1, exchanges=1, shared=1, device=1),
        "gather_tasks": Counts(1, 0, 0, 0, 0),
    }


def test_the_kernels_as_compiled_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    if find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed (nvidia-cuda-nvdisasm)")
    assert main(["--arch", "sm_90"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["gather_tasks, sm_90", "merge_top_m, sm_90"]
    assert all(int(number) > 0 for row in rows for number in row[1:])
