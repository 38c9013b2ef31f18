"""Tests of what is said about a pool worker that shares its GPU: the cost, and whether MPS runs."""

from pathlib import Path

import pytest

from runtime.checks.gpu_sharing import findings, mps_state, shared_gpus
from runtime.node.config import parse_config
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import NodePlan
from tests.node.test_layout import machine, placement_text


def plan_of(path: Path, pool: list[str], prefill: str = "cuda:0") -> NodePlan:
    sections = {"model": {"name": "m"}, "prefill": {"devices": [prefill]}, "decode": {"devices": ["cuda:2"]}}
    docs = [{"name": "docs", "path": str(path)}]
    return lay_out(
        parse_config({**sections, "pool": {"workers": len(pool), "devices": pool}, "collections": docs}), machine()
    )


def test_pool_workers_beside_others_on_a_gpu_are_listed_with_them(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ["cuda:0", "cuda:1"])
    assert list(shared_gpus(plan)) == ["pool-0 shares GPU 0 with prefill-0"]
    assert [worker.exclusive_gpu for worker in plan.of_role("pool")] == [False, True]
    assert list(shared_gpus(plan_of(tmp_path, ["cuda:0", "cuda:0"], "cuda:3"))) == [
        "pool-0 shares GPU 0 with pool-1",
        "pool-1 shares GPU 0 with pool-0",
    ]
    assert list(shared_gpus(plan_of(tmp_path, ["cpu"]))) == []


def test_the_placement_says_what_sharing_costs(tmp_path: Path) -> None:
    shared, alone = (placement_text(plan_of(tmp_path, [pool]), machine()) for pool in ("cuda:0", "cuda:1"))
    assert "pool-0 shares GPU 0 with prefill-0: without MPS they take turns of about 2 ms" in shared
    assert "MPS" not in alone


def test_mps_runs_if_its_daemon_and_the_pipe_of_this_environment_exist(tmp_path: Path) -> None:
    daemon, none = frozenset({"python", "nvidia-cuda-mps-control"}), frozenset({"python"})
    assert mps_state(tmp_path, none) == "MPS does not run"
    assert "set CUDA_MPS_PIPE_DIRECTORY" in mps_state(tmp_path, daemon)
    (tmp_path / "control").touch()
    assert mps_state(tmp_path, daemon) == ""
    assert mps_state(tmp_path, frozenset({"nvidia-cuda-mps"})) == ""  # cut by the kernel
    assert "left over, or outside this container" in mps_state(tmp_path, none)


def test_a_shared_gpu_without_mps_is_a_warning_and_with_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, ["cuda:0"])
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (found,) = findings(plan)
    assert (found.level, found.subject) == ("warning", "pool-0 GPU")
    assert found.text.startswith("shares GPU 0 with prefill-0; MPS does not run: processes take turns")
    assert "nvidia-cuda-mps-control -d" in found.advice
    monkeypatch.setattr("runtime.checks.gpu_sharing.mps_state", lambda: "")
    (found,) = findings(plan)
    assert (found.level, found.text) == ("ok", "shares GPU 0 with prefill-0; MPS runs")
    assert list(findings(plan_of(tmp_path, ["cuda:1"]))) == []
