"""The alerts fire when they should and are quiet when they should: Prometheus's own promtool says so."""

import json
import re
from pathlib import Path

import pytest

from dashboards.files import GENERATED
from dashboards.rules import RUNBOOK, Alert, alerts, rules_yaml
from runtime.node.config import SloSection
from runtime.node.metrics.columns import METRICS
from runtime.node.metrics.exporter import NodeCollector, render
from runtime.node.metrics.table import WorkerTable
from tests.dashboards.alert_cases import CASES, Series
from tests.dashboards.tools import promtool

ALERTS = {alert.name: alert for alert in alerts()}


def test_every_alert_has_a_case_and_every_case_an_alert() -> None:
    assert set(CASES) == set(ALERTS)


def test_the_rules_are_valid_as_they_are_and_shortened(tmp_path: Path) -> None:
    short = tmp_path / "short.yml"
    short.write_text(rules_yaml(scale=0.01, interval_s=0.5))
    run = promtool("check", "rules", GENERATED / "trinity-rules.yml", short)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(f"{len(ALERTS)} rules found") == 2


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_in_its_bad_course_with_its_labels_and_words(name: str, tmp_path: Path) -> None:
    alert, case = ALERTS[name], CASES[name]
    expected = {
        "exp_labels": {**case.labels, "severity": alert.severity},
        "exp_annotations": {
            "summary": re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: case.labels[m[1]], alert.summary),
            "runbook": f"{RUNBOOK}#{name.lower()}",
        },
    }
    checked(tmp_path, alert, {**case.common, **case.fires}, case.at_minute, [expected])


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_quiet_in_its_good_course(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checked(tmp_path, ALERTS[name], {**case.common, **case.quiet}, case.at_minute, [])


def checked(home: Path, alert: Alert, series: Series, at_minute: int, expected: list[object]) -> None:
    """Have promtool run one course and compare."""
    rules, test = home / "rules.yml", home / "test.yml"
    rules.write_text(rules_yaml())
    content = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [{"eval_time": f"{at_minute}m", "alertname": alert.name, "exp_alerts": expected}],
            }
        ],
    }
    test.write_text(json.dumps(content))  # YAML holds JSON
    run = promtool("test", "rules", test)
    assert run.returncode == 0, run.stdout + run.stderr


def test_what_a_node_exports_is_as_prometheus_likes_it() -> None:
    tables = {f"{role}-0": WorkerTable.create(role, f"{role}-0", SloSection()) for role in METRICS}
    text = render(NodeCollector(tables, constant={"node": "n", "model_name": "m"}))
    for table in tables.values():
        table.close()
    run = promtool("check", "metrics", stdin=text)
    assert run.returncode == 0, run.stdout + run.stderr
