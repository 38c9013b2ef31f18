"""The memory estimate of `serve --dry-run` matches the processes' memory."""

import pytest

from runtime.checks.memory_estimate import estimate_device_bytes
from runtime.node.config_file import load_config
from runtime.node.placement.layout import lay_out
from runtime.node.supervisor.admin import restart_node
from runtime.testing.node import Node
from tests.e2e.memory import proportional_bytes

TOLERANCE = 0.15  # of each process


def test_every_workers_memory_is_within_fifteen_percent_of_the_estimate(node: Node) -> None:
    restart_node(node.status().info, "", 300.0)  # who has compiled code in its first life holds the compiler's memory
    needed = estimate_device_bytes(lay_out(load_config(node.config)))
    pids = {worker.name: worker.pid for worker in node.status().workers}
    taken = proportional_bytes(pids | {"supervisor": node.status().info.pid})
    for name in pids:
        assert needed[name] == pytest.approx(taken[name], rel=TOLERANCE), name
