"""Tests of the measurements in the benchmark of live collections."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.collections import bench as collections
from benchmarks.collections import excluded, switch
from tests.gpu.datasets import clustered


def test_recall_counts_only_existing_rows() -> None:
    truth, found = np.array([[1, 2, -1], [3, 4, 5]]), np.array([[2, 9, -1], [5, 3, 4]])
    assert collections.recall(found, truth) == pytest.approx(4 / 5)


def test_filtered_searches_reach_the_requested_recall_at_every_selectivity(tmp_path: Path) -> None:
    vectors = clustered(np.random.default_rng(0), 1010, 16)
    records = collections.filtered(vectors[:1000], vectors[1000:], "l2", seed=0, place=tmp_path)
    own = [one for one in records if one["engine"] == "trinity"]
    assert len(own) == 12
    assert all(one["recall"] >= collections.ENOUGH for one in own)


def test_replaced_rows_are_found_as_well_as_in_a_fresh_build(tmp_path: Path) -> None:
    vectors = clustered(np.random.default_rng(0), 660, 16)
    found = collections.replaced(vectors[:650], vectors[650:], "l2", tmp_path / "a")
    assert found["ratio"] > 0.97
    upserts = collections.upserts(vectors, "l2", tmp_path / "b", batches=4)
    report = collections.report(
        {"set": "x", "rows": 650, "queries": 10, "seed": 0, "machine": {"processor": "p"}, "load": "none", "peers": {},
         "replaced": found, "upserts": upserts, "switch": [], "filtered": []}
    )  # fmt: skip
    assert f"fresh build {found['fresh']:.4f}" in report


def test_the_switch_to_scanning_is_measured_through_the_engine() -> None:
    vectors = clustered(np.random.default_rng(0), 920, 16)
    found = switch.switched(vectors[:900], vectors[900:], "l2", seed=0)
    assert [(one["part"], one["active"]) for one in found] == [(0.4, 1), (0.4, 8)], "fewer rows would be scanned"
    assert all(one["rows_a_step"] > 0 for one in found)
    assert "(`SCAN_ROWS_PER_ENTRY` is 5), 1 at a time: " in switch.report_of(found)


def test_filters_that_exclude_the_neighbourhood_are_measured_through_the_engine() -> None:
    vectors = clustered(np.random.default_rng(0), 2010, 16)
    found = excluded.excluded(vectors[:2000], vectors[2000:], "l2", seed=0)
    assert [one["filter"] for one in found][:2] == ["no filter", "random rows"]
    assert all(one["recall"] > 0.95 for one in found)
    report = excluded.report_excluded({"small": {"rows": 2000, "found": found, "processor": "a", "load": "b"}})
    assert report.count("| small, 2,000 rows |") == len(found)
