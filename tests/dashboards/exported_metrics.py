"""Names of all metrics in a node's /metrics, from the code that exports them."""

import tempfile
from pathlib import Path

from runtime.node.config import NodeConfig
from runtime.node.control.loop import ControlLoop
from runtime.node.metrics.kinds import Histogram
from runtime.node.metrics.worker_metrics import METRICS
from runtime.node.placement.gpus import Gpus
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.admin import NodeStatus
from runtime.node.supervisor.node_metrics import node_families
from tests.node.fake_nvml import Card, FakeNvml


def exported_names() -> set[str]:
    names: set[str] = set()
    for metric in (metric for role in METRICS for metric in METRICS[role]):
        if isinstance(metric, Histogram):
            names |= {f"{metric}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(metric.name)
    config = NodeConfig()
    families = [
        *node_families(config, [], NodeStatus(NodeInfo("n", 1, "", "", (), ()), False, ())),
        *ControlLoop(config, {}).families(),
        *Gpus(FakeNvml([Card("GPU-0")]), Path(tempfile.gettempdir())).families(),
    ]
    return names | {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
