"""Tests of calibration: line fits and measured extend times."""

from pathlib import Path

import numpy as np
import pytest

from gpu import GraphIndex
from runtime.errors import ConfigError
from runtime.node.config import CollectionSection, NodeConfig, parse_config
from runtime.node.worker_config import PoolSection
from runtime.pool.sizing import ExtendCost
from runtime.retrieval.collections import bulk_load
from runtime.simulator.times.calibrate import calibrate, search_times
from runtime.simulator.times.service import ServiceTimes


def test_a_node_without_collections_or_model_cannot_be_calibrated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        calibrate(NodeConfig(), ServiceTimes())


def test_calibration_of_a_sharded_collection_measures_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = np.random.default_rng(0).standard_normal((301, 16), np.float32)
    bulk_load.build(vectors, tmp_path / "split", metric="l2", degree=8, shards=3)
    sizes: list[int] = []

    def noted(index: GraphIndex, pool: PoolSection) -> list[ExtendCost]:
        sizes.append(index.size)
        found = search_times(index, pool)
        assert [one.active for one in found] == [1, 2, 3, 4]
        return found

    monkeypatch.setattr("runtime.simulator.times.calibrate.search_times", noted)
    pool = PoolSection(workers=3, slots=4, top_m=16)
    config = NodeConfig(collections=(CollectionSection("docs", str(tmp_path / "split"), shards=3),), pool=pool)
    times = calibrate(config, ServiceTimes())
    assert sizes == [101]
    assert times.extend_time_s(4) > 0
    assert times.round_s + times.query_s > 0
    assert times.source.startswith("measured on this machine: extends of docs")


def test_a_model_is_measured_on_decodes_device_without_a_cpu_fallback(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")
    from runtime.testing.tiny_model import make_tiny_llama

    model = {"name": str(make_tiny_llama(tmp_path)), "context_tokens": 64}
    base = ServiceTimes(link_bytes_s=1.0)
    found = calibrate(parse_config({"model": model, "decode": {"slots": 2}}), base)
    assert found.decode_step_s + found.decode_row_s > 0
    assert found.link_bytes_s > 1e6
    if torch.cuda.is_available():
        return
    with pytest.raises(ConfigError, match="a model on 'cuda:0': this torch"):
        calibrate(parse_config({"model": model, "decode": {"slots": 2, "devices": ["cuda:0"]}}), base)
