"""Extends are timed by the number of active slots."""

import numpy as np
import numpy.typing as npt

from gpu import CpuEngine, GraphIndex, SearchParams
from gpu.extend_times import measure_extends, typical_queries
from tests.gpu.datasets import clustered


class SteadyEngine(CpuEngine):
    """Every extend takes one second of its clock, regardless of the number of slots."""

    seconds = 0

    def extend(self) -> npt.NDArray[np.int32]:
        self.seconds += 1
        return super().extend()


def test_extends_are_timed_from_one_slot_to_all_and_slots_are_released() -> None:
    index = GraphIndex.build(clustered(np.random.default_rng(0), 600, 16), metric="l2", degree=8)
    engine = SteadyEngine({"docs": index}, slots=6, max_top_m=64)
    times = measure_extends(engine, "docs", index, SearchParams(1, 64, 2), clock=lambda: float(engine.seconds))
    assert [one.active for one in times] == [1, 2, 4, 6]
    assert [one.seconds for one in times] == [1.0] * 4
    assert engine.free_slots == 6


def test_queries_are_near_stored_vectors_whatever_scale_the_rows_have() -> None:
    vectors = clustered(np.random.default_rng(0), 600, 16)
    exact, scaled = (GraphIndex.build(vectors, metric="l2", degree=8, dtype=of) for of in ("float32", "float16"))
    assert scaled.data.rows.scale > 1
    np.testing.assert_allclose(typical_queries(scaled, 20), typical_queries(exact, 20), atol=0.05)
