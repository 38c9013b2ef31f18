"""The start of a worker whose code differs from its supervisor's, after an upgrade of Trinity."""

import contextlib
import os
import subprocess
import sys

import msgspec
import pytest

from runtime.node.config import SloSection, parse_config
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.layout import lay_out
from runtime.node.worker import WorkerSpec


def said(order: bytes) -> str:
    """Return the one line with which the process exits."""
    code = "import sys; from runtime.node.worker import main; sys.exit(main(lambda role: None, {}))"
    done = subprocess.run([sys.executable, "-c", code], input=order, capture_output=True, timeout=120)
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 1
    return line


@pytest.mark.parametrize("order", [b"", b'{"epoch": 1}\n', b"garbage\n"])
def test_a_start_order_of_another_version_exits_with_the_advice_to_restart_the_node(order: bytes) -> None:
    assert "runs another version of Trinity, restart the node: " in said(order)


def test_a_metrics_table_of_another_version_exits_with_the_advice_to_restart_the_node() -> None:
    plan = lay_out(parse_config({"collections": [{"name": "docs", "path": "/docs", "required": False}]}))
    with contextlib.closing(WorkerTable.create("pool", "frontend-0", SloSection())) as table:
        spec = WorkerSpec(plan, "frontend-0", 1, table.reference, os.getpid())
        line = said(msgspec.json.encode(spec) + b"\n")
    assert "restart the node: worker table of frontend: " in line
