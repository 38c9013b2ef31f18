"""Tests of the GPU check's measurement of prefill under a decode flood, through a pool on the CPU backend."""

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data import DataSet, nearest
from benchmarks.gpu_check import bench as gpu_check
from benchmarks.gpu_check import compiling
from benchmarks.gpu_check.bench import Section
from benchmarks.gpu_check.clients import Clients
from benchmarks.gpu_check.load_driver import poisson
from benchmarks.gpu_check.sections import flood
from benchmarks.gpu_check.setup import Setup, Source
from benchmarks.gpu_check.targets import verdicts
from gpu import CpuEngine, GraphIndex, SearchParams
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.pool import process
from tests.gpu.datasets import clustered


@pytest.fixture(scope="module")
def index() -> GraphIndex:
    return GraphIndex.build(clustered(np.random.default_rng(0), 500, 16), metric="l2", degree=8)


def setup_of(index: GraphIndex, device: str) -> Setup:
    queries = clustered(np.random.default_rng(1), 30, 16)
    vectors = clustered(np.random.default_rng(0), 500, 16)
    data = DataSet("small", "l2", vectors, queries, nearest(vectors, queries, 10))
    params = SearchParams(5, 32, 2)
    source = Source("small")
    return Setup(device, "a device", source, "float32", 32, 4, True, {}, params=params, given=(data, index))


def test_clients_submit_prefill_on_schedule_and_keep_the_maximum_of_decode_queries_outstanding(
    index: GraphIndex,
) -> None:
    setup = setup_of(index, "cpu")
    queries = setup.data.queries
    with flood.pool_over(setup, "auto") as pool, closing(Clients(pool, setup.params, queries)) as clients:
        alone, per_s = clients.run(poisson(5000.0, 40), 0, 0.0, 60.0)
        assert alone.ids.tolist() == np.tile(index.search(queries, 5, 32, 2)[0], (2, 1))[:40].tolist()
        assert [pool.metric(PoolMetrics.QUERIES[stage]) for stage in ("prefill", "decode")] == [40.0, 0.0]
        assert per_s == 0.0
        assert (alone.latency_s > 0).all()
        beside, per_s = clients.run(0.05 + poisson(5000.0, 40), 200, 0.0, 60.0)
        assert beside.ids.tolist() == alone.ids.tolist()
        assert pool.metric(PoolMetrics.QUERIES["prefill"]) == 80.0
        assert pool.metric(PoolMetrics.QUERIES["decode"]) > 200.0
        assert per_s > 0.0
        given_up, _ = clients.run(np.array([0.0, 1000.0]), 0, 0.0, 0.2)
        assert np.isfinite(given_up.latency_s).tolist() == [True, False]
        assert flood.p99_of(given_up) == float("inf")
        assert flood.p99_of(alone) == max(alone.latency_s)


def test_a_pool_error_invalidates_the_measurement(index: GraphIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood, "_SMALL_RING_SLOTS", 8192)  # more than the queue holds
    setup = setup_of(index, "cpu")
    with (
        flood.pool_over(setup, "auto") as pool,
        closing(Clients(pool, setup.params, setup.data.queries)) as clients,
        pytest.raises(AssertionError, match="with an error"),
    ):
        clients.run(np.zeros(0), 8192, 0.5, 60.0)


def test_on_a_gpu_the_plan_selects_the_resident_kernel_and_the_configuration_selects_launches(
    index: GraphIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def open_engine(device: str, collections: Any, *, resident: bool, **limits: Any) -> Any:
        calls.append((device, resident))
        return CpuEngine(collections, **limits)

    monkeypatch.setattr(process, "open_engine", open_engine)
    for form in flood.FORMS:
        with flood.pool_over(setup_of(index, "cuda:0"), form):
            pass
    assert calls == [("cuda:0", True), ("cuda:0", False)]


def test_on_a_gpu_the_pool_is_compiled_while_the_data_is_generated(
    index: GraphIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []
    first = Section(lambda setup, outcome: begun.append("sections"), 100.0)
    monkeypatch.setattr(gpu_check, "SECTIONS", {"first": first})
    monkeypatch.setattr(gpu_check, "prepare", lambda options: [setup_of(index, "cpu")])

    def compile_in_background() -> nullcontext[None]:
        begun.append("compiling")
        return nullcontext()

    monkeypatch.setattr(gpu_check, "compile_in_background", compile_in_background)
    for options in (["--dry-run"], []):
        assert gpu_check.main([*options, "--out", str(tmp_path)]) == 0
    assert begun == ["sections", "compiling", "sections"]
    compiling.main()
    assert "… decode queries answered meanwhile" in capsys.readouterr().out


def test_prefill_under_a_flood_is_compared_with_prefill_alone_and_a_missing_answer_fails() -> None:
    forms = {"auto": {"alone_p99_s": 1e-4, "flood_p99_s": 1.2e-4}, "launches": {"alone_p99_s": 1e-4}}
    auto, launches = verdicts({"flood": forms})[-2:]
    assert (auto[1].split()[0], auto[2]) == ("1.200", "pass")
    assert launches[2] == "not measured"
    forms["launches"]["flood_p99_s"] = float("inf")
    assert verdicts({"flood": forms})[-1][2] == "FAIL"
