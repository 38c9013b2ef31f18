"""`trinity doctor` finds problems before a node starts and recommends remedies."""

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launchers.main import command_line
from runtime.checks.diagnosis import GpuProbe, Probe, copy_compiles, cuda_ipc, diagnose, kernels_compile, torch_works
from runtime.checks.finding import Finding
from runtime.node.config import NodeConfig, parse_config
from runtime.node.placement.gpus import Gpu, Gpus
from tests.node.fake_nvml import Card, FakeNvml

CARDS = [Card("GPU-aaaaaaaa", used=1 << 30), Card("GPU-bbbbbbbb", bus="00000000:2A:00.0", used=79 << 30)]


def works(one: Gpu, other: Gpu) -> str:
    return ""


def works_too(gpu: Gpu) -> str:
    return ""


def findings(
    config: NodeConfig | None = None,
    nvml: FakeNvml | None = None,
    probe: Probe = works,
    torch: GpuProbe = works_too,
    kernels: GpuProbe = works_too,
    copy: GpuProbe = works_too,
) -> dict[str, Finding]:
    gpus = Gpus(nvml or FakeNvml([], broken="Driver Not Loaded"))
    return {finding.subject: finding for finding in diagnose(config, gpus, probe, torch, kernels, copy)}


def test_a_missing_driver_is_a_warning_for_cpu_nodes_and_an_error_for_gpu_nodes(tmp_path: Path) -> None:
    assert findings()["driver"].level == "warning"
    config = parse_config({"pool": {"devices": ["cuda:0"]}, "collections": [{"name": "d", "path": str(tmp_path)}]})
    found = findings(config)
    assert found["driver"].level == "error"
    assert "Driver Not Loaded" in found["driver"].text
    assert "cuda:0" in found["model, index and placement"].text


def test_gpus_memory_and_peer_access_are_reported() -> None:
    found = findings(nvml=FakeNvml(CARDS, peers={(0, 1)}))
    assert found["GPU 0"].level == "ok"
    assert found["GPU 1"].level == "warning"  # nearly full
    assert found["GPU 0 ↔ 1 peers"].text == "direct"
    assert found["GPU 0 → 1 CUDA IPC"].level == found["GPU 1 → 0 CUDA IPC"].level == "ok"


MODEL_ON_GPUS = {"prefill": {"devices": ["cuda:0"]}, "decode": {"devices": ["cuda:1"]}}


def test_a_model_on_a_gpu_needs_a_torch_with_cuda_that_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"model": {"name": "m"}, **MODEL_ON_GPUS})
    monkeypatch.setattr("runtime.checks.diagnosis.torch_cuda", lambda: None)
    found = findings(config, FakeNvml(CARDS))
    assert (found["torch CUDA"].level, "has no CUDA" in found["torch CUDA"].text) == ("error", True)
    monkeypatch.setattr("runtime.checks.diagnosis.torch_cuda", lambda: "13.0")
    found = findings(config, FakeNvml(CARDS), torch=lambda gpu: "driver too old" if gpu.index == "1" else "")
    assert (found["torch CUDA"].level, found["GPU 0 torch"].level) == ("ok", "ok")
    assert (found["GPU 1 torch"].level, found["GPU 1 torch"].text) == ("error", "driver too old")
    assert "GPU 1 torch" not in findings(None, FakeNvml(CARDS))


DECODE_ON_GPUS = {
    "model": {"name": "m"},
    "prefill": {"devices": ["cuda:3"]},
    "decode": {"devices": ["cuda:0", "cuda:1", "cuda:2"], "workers": 3},
}


@pytest.mark.parametrize(
    ("probe", "subject", "other", "sections"),
    [
        ("kernels", "kernels", "KV copy", {"pool": {"devices": ["cuda:0", "cuda:1", "cuda:2"], "workers": 3}}),
        ("copy", "KV copy", "kernels", DECODE_ON_GPUS),
    ],
)
def test_a_kernel_that_does_not_compile_for_a_gpu_that_runs_it_is_an_error_before_a_node_starts(
    probe: str, subject: str, other: str, sections: dict[str, Any]
) -> None:
    cards = [*CARDS, Card("GPU-cccccccc", capability=(10, 0)), Card("GPU-dddddddd", capability=(8, 0))]
    asked = []

    def compiles(gpu: Gpu) -> str:
        asked.append(gpu.arch)
        return "" if gpu.arch == "sm_90" else "with NVRTC 13.0 they do not"

    probes: dict[str, Any] = {probe: compiles}
    found = findings(parse_config(sections), FakeNvml(cards), **probes)
    assert asked == ["sm_90", "sm_100"]  # each architecture of the pool, or of decode, once
    assert found[f"{subject} for sm_90"].level == "ok"
    failed = found[f"{subject} for sm_100"]
    assert (failed.level, failed.text) == ("error", "with NVRTC 13.0 they do not")
    assert f"{other} for sm_90" not in found
    findings(parse_config({"model": {"name": "m"}}), FakeNvml(cards), **probes)
    assert len(asked) == 2


@pytest.mark.parametrize("compiles", [kernels_compile, copy_compiles])
def test_the_reason_why_kernels_do_not_compile_is_reported(compiles: GpuProbe) -> None:
    pytest.importorskip("cuda.bindings")
    assert "'sm_10' is unknown to NVRTC" in compiles(Gpu("0", "GPU-aaaaaaaa", "old", "", 1, 1, arch="sm_10"))


@pytest.mark.parametrize(("sections", "level"), [({}, "warning"), ({"model": {"name": "m"}, **MODEL_ON_GPUS}, "error")])
def test_a_pair_without_cuda_ipc_is_a_warning_with_the_reason_and_an_error_for_a_model(
    sections: dict[str, Any], level: str
) -> None:
    found = findings(parse_config(sections), FakeNvml(CARDS), probe=lambda one, other: "invalid device context")
    assert found["GPU 0 ↔ 1 peers"].level == "warning"
    assert (found["GPU 0 → 1 CUDA IPC"].level, found["GPU 0 → 1 CUDA IPC"].text) == (level, "invalid device context")


@pytest.mark.skipif(not Gpus().missing, reason="this machine has a driver")
def test_a_torch_that_fails_on_a_gpu_is_reported_with_the_reason() -> None:
    pytest.importorskip("torch")
    assert torch_works(Gpu("0", "GPU-aaaaaaaa", "none", "", 1, 1)) != ""


@pytest.mark.skipif(not Gpus().missing, reason="this machine has a driver")
def test_untestable_cuda_ipc_is_reported_with_the_reason() -> None:
    gpu = Gpu("0", "GPU-aaaaaaaa", "none", "", 1, 1)
    assert cuda_ipc(gpu, gpu) != ""


def test_the_command_exits_with_1_only_for_errors(tmp_path: Path) -> None:
    run = CliRunner().invoke(command_line(), ["doctor"])
    assert run.exit_code == 0, run.output
    assert "open files" in run.output
    config = tmp_path / "node.toml"
    config.write_text('[http]\nport = 0\n[[collections]]\nname = "d"\npath = "none"\n')
    run = CliRunner().invoke(command_line(), ["doctor", "--config", str(config)])
    assert run.exit_code == 1
    assert "error" in run.output


def test_an_unreachable_server_is_an_error_with_its_address(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    found = findings(parse_config({"model": {"engine": "openai", "name": "big", "url": url}, "http": {"port": 0}}))
    assert found[f"engine {url}"].level == "error"
    assert "does not answer" in found[f"engine {url}"].text
    assert found[f"engine {url}"].advice.startswith("start it")


def test_a_port_in_use_is_a_warning_and_one_that_cannot_be_used_an_error() -> None:
    model = {"engine": "openai", "name": "big", "url": "http://127.0.0.1:9/v1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings(parse_config({"model": model, "http": {"port": port}}))["port"]
        assert (found.level, f"http.port = {port}" in found.text) == ("warning", True)
    assert findings(parse_config({"model": model, "http": {"port": port}}))["port"].level == "ok"
    elsewhere = {"host": "192.0.2.1", "port": 0, "api_keys_file": "/keys"}
    assert findings(parse_config({"model": model, "http": elsewhere}))["port"].level == "error"


def test_an_unwritable_compile_cache_is_reported_with_an_alternative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert findings()["compiled code"].level == "ok"
    monkeypatch.setattr("runtime.checks.diagnosis.can_cache", lambda: False)
    found = findings()["compiled code"]
    assert (found.level, "NUMBA_CACHE_DIR" in found.advice) == ("warning", True)
