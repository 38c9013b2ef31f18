"""Metrics of others where they exist: vLLM's NIXL connector on the overview, llm-d's flow control on the fleet."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dashboards.provisioning import all_dashboards
from runtime.node.metrics.exporter import engine_families

# As vLLM 0.32 exports them (docs.vllm.ai/en/v0.32.0/usage/metrics), without most buckets.
NIXL = """\
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 4.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.02
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 4.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1e+09
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 0.0
# TYPE vllm:nixl_num_failed_notifications_total counter
vllm:nixl_num_failed_notifications_total{engine="0",model_name="m"} 0.0
# TYPE vllm:nixl_num_kv_expired_reqs_total counter
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 0.0
"""
# As llm-d's endpoint picker exports them with the feature gate `flowControl` (llm-d.ai, "Router Metrics").
LLM_D = """\
# TYPE llm_d_epp_flow_control_queue_size gauge
llm_d_epp_flow_control_queue_size{fairness_id="a",priority="0"} 2
# TYPE llm_d_epp_flow_control_pool_saturation gauge
llm_d_epp_flow_control_pool_saturation{inference_pool="p"} 0.5
# TYPE llm_d_epp_flow_control_request_queue_duration_seconds histogram
llm_d_epp_flow_control_request_queue_duration_seconds_bucket{priority="0",le="+Inf"} 3
llm_d_epp_flow_control_request_queue_duration_seconds_sum{priority="0"} 0.5
llm_d_epp_flow_control_request_queue_duration_seconds_count{priority="0"} 3
"""


def names_on(board: str, pattern: str) -> set[str]:
    """Return the metrics of a dashboard that match; a panel with one has queries for each user too."""
    found: set[str] = set()
    for panel in all_dashboards()[board]["panels"]:
        exprs = [target["expr"] for target in panel.get("targets", [])]
        names = {name for expr in exprs for name in re.findall(pattern, expr)}
        if names:
            assert any("trinity_" in expr and not re.search(pattern, expr) for expr in exprs), panel["title"]
        found |= names
    return found


def test_the_nodes_metrics_have_what_the_overview_shows_of_nixl(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text(NIXL)
    samples = [s for family in engine_families({"engine-decode-0": page}) for s in family.samples]
    assert {sample.labels["worker"] for sample in samples} == {"engine-decode-0"}
    shown = names_on("trinity-overview", r"vllm:nixl_\w+")
    assert len(shown) == 5
    assert shown <= {sample.name for sample in samples}


def test_the_fleet_shows_llm_ds_queue_by_its_names_and_the_ones_before() -> None:
    exported = {sample.name for family in text_string_to_metric_families(LLM_D) for sample in family.samples}
    shown = names_on("trinity-fleet", r"llm_d_epp_\w+")
    assert len(shown) == 3
    assert shown <= exported
    before = {name.replace("llm_d_epp", "inference_extension") for name in shown}
    assert names_on("trinity-fleet", r"inference_extension_\w+") == before
