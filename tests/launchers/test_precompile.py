"""`trinity precompile` leaves nothing to compile at a node's start."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launchers.commands.precompile import precompile as command
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.machine import Machine
from runtime.pool.loop_parts import is_cached


def precompile(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launchers.entry", "precompile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_the_loop_and_the_engines_are_compiled() -> None:
    done = precompile()
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "modules",
        "search engine and pool",
        "model on CPUs",
        "search engine on GPUs",
    ]
    assert is_cached()


def test_an_unknown_architecture_is_refused_before_anything_is_compiled() -> None:
    done = precompile("--arch", "sm_90", "--arch", "pentium")
    assert done.returncode == 2
    assert done.stderr.startswith("trinity: error: --arch: architecture 'pentium' is unknown to NVRTC ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


GPUS = tuple(
    Gpu(number, f"GPU-{number}", "H200", f"0000:1{number}:00.0", 141 << 30, 140 << 30, arch="sm_90") for number in "01"
)
NODE = """
[model]
name = "smollm2-135m-instruct"
[prefill]
devices = ["cuda:0"]
[decode]
devices = ["cuda:0", "cuda:1"]
workers = 3
slots = 8
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled on a machine with two GPUs, in order; nothing is."""
    found: list[str] = []
    for name in ("_pool", "_modules", "_cuda_engine"):
        monkeypatch.setattr(f"launchers.commands.precompile.{name}", partial(found.append, name.strip("_")))
    monkeypatch.setattr("gpu.cuda.compiler.compile_kernels", lambda arch: found.append(f"search {arch}"))
    monkeypatch.setattr("gpu.cuda.block_copy.compile_block_copy", lambda arch: found.append(f"copy {arch}"))
    monkeypatch.setattr("runtime.serving.kv.transport.transport_for", lambda device: device)
    monkeypatch.setattr(Machine, "read", lambda: Machine(GPUS, (0, 1, 2, 3), 64 << 30))

    def load(config: NodeConfig, device: Any, stamp: Any) -> None:
        found.append(f"{config.decode.slots} rows on {device}")

    monkeypatch.setattr("runtime.serving.decode.process.load_model", load)
    return found


def test_of_a_configuration_each_gpu_of_decode_compiles_as_its_worker_does(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    command(arch=["sm_100"], config=tmp_path / "node.toml")
    assert compiled == [
        "modules", "pool", "cuda_engine", "search sm_100", "copy sm_100", "search sm_90", "copy sm_90",
        "8 rows on GPU-0", "8 rows on GPU-1",
    ]  # fmt: skip


def test_a_configuration_that_does_not_fit_the_machine_is_refused_first(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(NODE.replace('"cuda:1"', '"cuda:7"'))
    with pytest.raises(ConfigError, match="'cuda:7' is not a GPU of this machine"):
        command(config=tmp_path / "node.toml")
    assert compiled == []
