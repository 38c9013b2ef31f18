"""`trinity precompile` leaves nothing to compile at a node's start."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launchers.commands.precompile import load_model_on
from launchers.commands.precompile import precompile as command
from runtime.errors import ConfigError, UsageError
from runtime.node.config import NodeConfig
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.machine import Machine
from runtime.pool.loop_parts import is_cached


def test_the_loop_and_the_engines_are_compiled() -> None:
    program = [sys.executable, "-m", "launchers.entry", "precompile"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "modules",
        "search engine and pool",
        "model on CPUs",
        "search engine on GPUs",
    ]
    assert is_cached()


def test_an_unknown_architecture_is_refused_before_anything_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"^--arch: architecture 'pentium' is unknown to NVRTC "):
        command(arch=["sm_90", "pentium"])
    assert capsys.readouterr().out == ""


KINDS = (("H200", "sm_90"), ("H200", "sm_90"), ("H200", "sm_90"), ("RTX 5090", "sm_120"))
GPUS = tuple(
    Gpu(str(number), f"GPU-{number}", name, f"0000:1{number}:00.0", 141 << 30, 140 << 30, arch=arch)
    for number, (name, arch) in enumerate(KINDS)
)
NODE = """
[model]
name = "smollm2-135m-instruct"
[prefill]
devices = ["cuda:0"]
[decode]
devices = ["cuda:1", "cuda:2", "cuda:3"]
workers = 3
slots = 16
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be compiled on a machine with GPUs of two kinds, in order."""
    found: list[str] = []
    for name in ("_pool", "_modules", "_cuda_engine"):
        monkeypatch.setattr(f"launchers.commands.precompile.{name}", partial(found.append, name.strip("_")))
    monkeypatch.setattr("gpu.cuda.compiler.compile_kernels", lambda arch: found.append(f"search {arch}"))
    monkeypatch.setattr("gpu.cuda.block_copy.compile_block_copy", lambda arch: found.append(f"copy {arch}"))
    monkeypatch.setattr(Machine, "read", lambda: Machine(GPUS, (0, 1, 2, 3), 64 << 30))

    def run(command: list[str], env: dict[str, str], check: bool) -> "subprocess.CompletedProcess[str]":
        _, _, module, config, device = command
        found.append(f"{module}, {Path(config).name} on {device}: {env['CUDA_VISIBLE_DEVICES']}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("launchers.commands.precompile.subprocess.run", run)
    return found


def test_of_a_configuration_the_model_is_compiled_once_for_each_kind_of_gpu_that_decode_uses(
    compiled: list[str], tmp_path: Path
) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    command(arch=["sm_100"], config=tmp_path / "node.toml")
    module = "launchers.commands.precompile, node.toml"
    assert compiled == [
        "modules", "pool", "cuda_engine", "search sm_100", "copy sm_100", "search sm_90", "copy sm_90",
        "search sm_120", "copy sm_120", f"{module} on cuda:0: GPU-1", f"{module} on cuda:0: GPU-3",
    ]  # fmt: skip


def test_the_model_is_loaded_as_its_decode_workers_load_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    loaded: list[tuple[int, str]] = []

    def load(config: NodeConfig, transport: str, stamp: Any) -> None:
        loaded.append((config.decode.slots, transport))

    monkeypatch.setattr("runtime.serving.kv.transport.transport_for", lambda device: f"transport of {device}")
    monkeypatch.setattr("runtime.serving.decode.process.load_model", load)
    assert load_model_on(tmp_path / "node.toml", "cuda:0") == 0
    assert loaded == [(16, "transport of cuda:0")]


def test_a_device_that_torch_lacks_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    assert load_model_on(tmp_path / "node.toml", "cuda:0") == 78
    assert capsys.readouterr().err.startswith("trinity: error: ")


def test_a_configuration_that_does_not_fit_the_machine_is_refused_first(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(NODE.replace('"cuda:0"', '"cuda:7"'))
    with pytest.raises(ConfigError, match="'cuda:7' is not a GPU of this machine"):
        command(config=tmp_path / "node.toml")
    assert compiled == []
