"""What compiled code calls is optimised and translated as a part of what Python calls, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import DefaultPassBuilder, Flags, StateDict

import ipc
from ipc.native import passes
from ipc.native.compiled import compiled

_CHAIN = """
from pathlib import Path
from numba.core.codegen import JITCodeLibrary
from ipc.native.compiled import compiler_for

compiled = compiler_for(Path(__file__).parent)

@compiled
def half(a):
    if a % 2:
        raise ValueError("an odd number")
    return a // 2

@compiled
def quarter(a):
    return half(half(a))

@compiled
def eighth(a):
    return half(quarter(a))

print(quarter(8))
try:
    eighth(12)
except ValueError as error:
    print(error, sum(eighth.stats.cache_hits.values()))
"""


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the libraries that are translated to machine code in this test."""
    compiled(lambda a: a)(1)  # numba's own first
    names: list[str] = []
    translate = JITCodeLibrary._finalize_specific  # noqa: SLF001

    def counted(library: Any) -> None:
        names.append(library.name)
        translate(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", counted)
    return names


def test_only_what_python_calls_is_translated(translated: list[str]) -> None:
    @compiled
    def low(a: int) -> int:
        return a + 1

    @compiled
    def middle(a: int) -> int:
        return 2 * low(a)

    @compiled
    def high(a: int) -> int:
        return middle(a) - low(a)

    assert high(3) == 4
    assert len(translated) == 1
    assert "high" in translated[0]
    assert middle(3) == 8, "Python may call what compiled code calls"
    assert len(translated) == 2


def test_what_another_process_has_compiled_is_linked(tmp_path: Path) -> None:
    program = tmp_path / "chain.py"
    variables = os.environ | {"PYTHONPATH": str(Path(ipc.__file__).parents[1]), "NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> str:
        command = [sys.executable, str(program)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    program.write_text(_CHAIN)
    assert run() == "2\nan odd number 0\n"
    assert run() == "2\nan odd number 1\n"
    for written in tmp_path.rglob("*eighth*"):
        written.unlink()
    assert run() == "2\nan odd number 0\n", "it is compiled again, from what it calls in the cache"


def test_the_passes_that_are_left_out_are_numbas() -> None:
    state = StateDict()
    state.flags, state.func_ir = Flags(), None
    names = {kind.name() for kind, _ in DefaultPassBuilder.define_nopython_pipeline(state).passes}
    assert names >= passes.NEEDLESS | passes.OF_ARRAYS
