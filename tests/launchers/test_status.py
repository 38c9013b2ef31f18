"""`trinity status` on a terminal of 80 columns."""

import io

import pytest
from rich.console import Console

from launchers.status import show_workers
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.admin import NodeStatus, WorkerStatus

NAMES = ("frontend-0", "prefill-0", "prefill-10", "decode-0", "pool-0")


@pytest.mark.parametrize("device", ["cpu", "cuda:0,1,2,3"])
def test_names_and_states_are_complete_and_lines_fit_the_terminal(device: str) -> None:
    workers = tuple(
        WorkerStatus(name, "starting", 4_194_303, 1, 12, 0.1, 12_345 << 20, device, tuple(range(0, 64, 2)))
        for name in NAMES
    )
    info = NodeInfo("a-node", 4_194_302, "http://127.0.0.1:8080", "control", (), ())
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    show_workers(NodeStatus(info, False, workers), console)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    for name in NAMES:
        assert [line.split()[:2] for line in lines].count([name, "starting"]) == 1
