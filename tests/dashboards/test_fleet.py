"""The fleet dashboard evaluated by Prometheus: two nodes with models, one gateway node."""

import json
from pathlib import Path
from typing import Any

import pytest

from dashboards.fleet import fleet
from tests.dashboards.alert_cases import constant, grows
from tests.dashboards.tools import promtool

BOARD = fleet()
MODEL = 'model_name="m"'
OWN = ("a", "b")
STAGES = {  # of node a; b has twice as much
    'trinity_prefill_waiting{{{0},worker="prefill-0"}}': 1,
    'trinity_prefill_running{{{0},worker="prefill-0"}}': 2,
    'trinity_num_requests_waiting{{{0},worker="decode-0"}}': 3,
    'trinity_num_requests_running{{{0},worker="decode-0"}}': 4,
    'trinity_kv_cache_usage_perc{{{0},worker="decode-0"}}': 0.25,
    'trinity_kv_cache_usage_perc{{{0},worker="decode-1"}}': 0.125,
}


def courses() -> dict[str, str]:
    """Series by name: their values, minute by minute."""
    found = {'up{job="trinity",instance="d"}': constant(0)}
    for times, node in enumerate((*OWN, "gateway"), 1):
        where = f'node="{node}",{MODEL},job="trinity",instance="{node}"'
        found |= {
            f'up{{job="trinity",instance="{node}"}}': constant(1),
            f"trinity_node_info{{{where}}}": constant(1),
            f"trinity_node_draining{{{where}}}": constant(float(node == "b")),
            f'trinity_requests_total{{{where},worker="frontend-0",outcome="finished"}}': grows(60 * times),
            f'trinity_requests_total{{{where},worker="frontend-0",outcome="failed"}}': grows(60),
            f'trinity_requests_in_flight{{{where},worker="frontend-0"}}': constant(7 * times),
        }
        if node in OWN:
            found |= {name.format(where): constant(value * times) for name, value in STAGES.items()}
    return found


def panels(kind: str) -> dict[str, dict[str, Any]]:
    return {panel["title"]: panel for panel in BOARD["panels"] if panel["type"] == kind}


def column(name: str) -> str:
    """Return the expression of a column of the node table."""
    table = panels("table")["Nodes"]
    names = table["transformations"][1]["options"]["renameByName"]
    return next(str(one["expr"]) for one in table["targets"] if names[f"Value #{one['refId']}"] == name)


def tile(title: str) -> str:
    return str(panels("stat")[title]["targets"][0]["expr"])


def by_node(**values: float) -> list[dict[str, Any]]:
    return [{"labels": f'{{node="{node}"}}', "value": value} for node, value in values.items()]


def filled(expr: str, node: str) -> str:
    for name, value in {"$__rate_interval": "5m", "$node": node, "$model": ".*"}.items():
        expr = expr.replace(name, value)
    return expr


def checked(home: Path, expr: str, expected: list[dict[str, Any]], node: str = ".*") -> None:
    content = {
        "rule_files": [],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in courses().items()],
                "promql_expr_test": [{"expr": filled(expr, node), "eval_time": "30m", "exp_samples": expected}],
            }
        ],
    }
    (home / "test.yml").write_text(json.dumps(content))
    run = promtool("test", "rules", home / "test.yml")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("title", "node", "value"),
    [
        ("Nodes", ".*", 3), ("Nodes", "a|b", 2), ("Down", ".*", 1), ("Down", "a", 1),
        ("Draining", ".*", 1), ("Waiting", ".*", 12), ("Requests", ".*", 9), ("Requests", "a", 2),
        ("Fullest KV", ".*", 0.5), ("Errors", ".*", 1 / 3), ("Errors", "gateway", 0.25),
    ],
)  # fmt: skip
def test_a_tile_shows_the_sum_or_the_worst_of_the_selected_nodes(
    title: str, node: str, value: float, tmp_path: Path
) -> None:
    checked(tmp_path, tile(title), [{"labels": "{}", "value": value}], node)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("waiting", {"a": 4, "b": 8, "gateway": 0}),
        ("running", {"a": 6, "b": 12, "gateway": 21}),
        ("fullest KV", {"a": 0.25, "b": 0.5}),
        ("draining", {"a": 0, "b": 1, "gateway": 0}),
    ],
)
def test_a_column_of_the_table_has_a_value_for_each_node_that_has_any(
    name: str, values: dict[str, float], tmp_path: Path
) -> None:
    checked(tmp_path, column(name), by_node(**values))


def test_a_nodes_name_links_to_its_overview() -> None:
    (override,) = (o for o in panels("table")["Nodes"]["fieldConfig"]["overrides"] if o["matcher"]["options"] == "node")
    (link,) = override["properties"][0]["value"]
    assert link["url"].startswith("/d/trinity-overview?var-node=${__value.text}")
