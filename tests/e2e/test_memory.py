"""The memory estimate of `serve --dry-run` matches the processes' memory."""

import psutil
import pytest

from runtime.checks.memory_estimate import IMPORTS, estimate, shared_bytes
from runtime.node.config_file import load_config
from runtime.node.placement.layout import lay_out
from runtime.node.supervisor.admin import restart_node
from runtime.testing.node import Node
from tests.e2e.memory import proportional_bytes

TOLERANCE = 0.15
_SUPERVISOR_BYTES = 42 << 20


def test_a_nodes_memory_is_within_fifteen_percent_of_the_estimate(node: Node) -> None:
    restart_node(node.status().info, "", 300.0)  # who has compiled code in its first life holds the compiler's memory
    plan = lay_out(load_config(node.config))
    needed = sum(need.host + need.mapped for need in estimate(plan).values())
    needed += shared_bytes(plan)[IMPORTS] + _SUPERVISOR_BYTES
    supervisor = psutil.Process(node.status().info.pid)
    processes = {f"{process.pid}": process.pid for process in (supervisor, *supervisor.children())}
    assert len(processes) == len(node.status().workers) + 2  # the process from which workers are forked
    taken = proportional_bytes(processes)
    assert needed == pytest.approx(sum(taken.values()), rel=TOLERANCE), taken
