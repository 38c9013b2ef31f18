"""`trinity precompile` leaves nothing to compile at a node's start."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from launchers.commands.precompile import compile_model
from launchers.commands.precompile import precompile as command
from runtime.errors import ConfigError, UsageError
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.machine import Machine
from runtime.serving.model.compilation import ModelSetup

ROOT = Path(__file__).parents[2]
IS_CACHED = "from runtime.pool.loop_parts import is_cached; print(is_cached())"
REMOVED = (
    "runtime/pool/__pycache__/loop_driver.*.nbi",
    "runtime/pool/__pycache__/sizing.*.nbi",
    "gpu/cpu/__pycache__/backend.admit-*.nbi",
    "gpu/cuda/__pycache__/resident.stop-*.nbi",
)
"""What is compiled again: the functions of the loop that Python calls, and one of each engine."""


@pytest.fixture
def incomplete(tmp_path: Path) -> Path:
    """A copy of the sources with their machine code, without that of some functions."""
    for folder in ("dashboards", "gpu", "ipc", "launchers", "runtime"):
        being_written = shutil.ignore_patterns("*.lock", "*.tmp*")
        shutil.copytree(ROOT / folder, tmp_path / folder, copy_function=os.symlink, ignore=being_written)
    for pattern in REMOVED:
        for code in tmp_path.glob(pattern):
            code.unlink()
    return tmp_path


@pytest.mark.timeout(900)  # it compiles for half a minute of a core that is its own
def test_the_loop_and_the_engines_are_compiled(incomplete: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=incomplete, env=environment, capture_output=True, text=True, timeout=800, check=False
        )

    assert run("-c", IS_CACHED).stdout == "False\n"
    done = run("-m", "launchers.entry", "precompile")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "modules",
        "search engine and pool",
        "model on CPUs",
        "search engine on GPUs",
    ]
    assert [pattern for pattern in REMOVED if not any(incomplete.glob(pattern))] == []
    assert run("-c", IS_CACHED).stdout == "True\n"


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
        _, _, module, config, role, device = command
        found.append(f"{module}, {Path(config).name}, {role} on {device}: {env['CUDA_VISIBLE_DEVICES']}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("launchers.commands.precompile.subprocess.run", run)
    return found


def test_of_a_configuration_the_model_is_compiled_once_for_each_role_and_kind_of_gpu(
    compiled: list[str], tmp_path: Path
) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    command(arch=["sm_100"], config=tmp_path / "node.toml")
    module = "launchers.commands.precompile, node.toml"
    assert compiled == [
        "modules", "pool", "cuda_engine", "search sm_100", "copy sm_100", "search sm_90", "copy sm_90",
        "search sm_120", "copy sm_120", f"{module}, decode on cuda:0: GPU-1", f"{module}, decode on cuda:0: GPU-3",
        f"{module}, prefill on cuda:0: GPU-0",
    ]  # fmt: skip


@pytest.mark.parametrize(("role", "rows", "tokens"), [("decode", 16, 16 + 256), ("prefill", 0, 1024)])
def test_the_model_is_compiled_as_the_roles_workers_run_it(
    role: Literal["prefill", "decode"], rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    compiled: list[ModelSetup] = []

    def compile_programs(setup: ModelSetup) -> bool:
        compiled.append(setup)
        return len(compiled) == 1

    transport = SimpleNamespace(device="cuda:0", kernels="paged")
    monkeypatch.setattr("runtime.serving.kv.transport.transport_for", lambda device: transport)
    monkeypatch.setattr("runtime.serving.model.compilation.compile_programs", compile_programs)
    assert compile_model(tmp_path / "node.toml", role, "cuda:0") == 0
    assert compile_model(tmp_path / "node.toml", role, "cuda:0") == 1, "torch cannot"
    setup, _ = compiled
    assert (setup.rows, setup.tokens, setup.prompts_only) == (rows, tokens, role == "prefill")
    assert (setup.device, setup.kernels, setup.weights) == ("cuda:0", "paged", "bfloat16")


def test_a_device_that_torch_lacks_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    assert compile_model(tmp_path / "node.toml", "decode", "cuda:0") == 78
    assert capsys.readouterr().err.startswith("trinity: error: ")


def test_a_configuration_that_does_not_fit_the_machine_is_refused_first(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(NODE.replace('"cuda:0"', '"cuda:7"'))
    with pytest.raises(ConfigError, match="'cuda:7' is not a GPU of this machine"):
        command(config=tmp_path / "node.toml")
    assert compiled == []
