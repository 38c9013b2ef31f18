"""The start of a worker whose code differs from its supervisor's, after an upgrade of Trinity, and a worker's end."""

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
    done = subprocess.run(
        [sys.executable, "-m", "runtime.worker_process"], input=order, capture_output=True, timeout=120
    )
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


def test_a_process_that_ends_does_not_wait_for_its_interpreter_to_unload() -> None:
    code = "import atexit, runpy; atexit.register(print, 'unloading'); "
    code += "runpy.run_module('runtime.worker_process', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], input=b"", capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"restart the node" in done.stderr
