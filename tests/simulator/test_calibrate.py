"""Calibration: lines are fitted, and an engine's extends get a time."""

from pathlib import Path

import numpy as np
import pytest

from gpu import GraphIndex
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.simulator.calibrate import Line, calibrate, extend_times
from runtime.simulator.service import ServiceTimes


def test_a_line_is_found_again() -> None:
    x = [1.0, 2.0, 8.0, 64.0]
    line = Line.fit(x, [3e-5 + 2e-6 * value for value in x])
    assert line.fixed == pytest.approx(3e-5)
    assert line.each == pytest.approx(2e-6)


@pytest.mark.parametrize("y", [[1e-3, 1e-3, 1e-3], [1e-3, 5e-3, 9e-3], [3e-3, 2e-3, 1e-3]])
def test_no_cost_is_below_nothing(y: list[float]) -> None:
    line = Line.fit([1, 2, 4], y)
    assert line.fixed >= 0
    assert line.each >= 0


def test_extends_of_an_index_cost_something() -> None:
    vectors = np.random.default_rng(0).standard_normal((500, 16), np.float32)
    line = extend_times(GraphIndex.build(vectors, metric="l2", degree=8), slots=8, top_m=32, search_width=2)
    assert line.fixed + 8 * line.each > 0


def test_a_node_that_names_nothing_cannot_be_calibrated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        calibrate(NodeConfig(), ServiceTimes())
