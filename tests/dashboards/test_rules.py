"""Alerts fire and stay quiet as expected, checked by promtool."""

import json
import re
from pathlib import Path

import pytest

from dashboards.provisioning import GENERATED
from dashboards.rules import RUNBOOK, Alert, alerts, rules_yaml
from runtime.node.config import SloSection
from runtime.node.metrics.exporter import render, table_families
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import METRICS
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


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What promtool says of each course, by the name of its file: one run, for most of one is its start."""
    home = tmp_path_factory.mktemp("courses")
    head, *rules = re.split("^(?=  - alert: )", rules_yaml(), flags=re.MULTILINE)
    for name, rule in zip(ALERTS, rules, strict=True):
        case = CASES[name]
        (home / f"{name}.yml").write_text(head + rule)  # all rules would take as much longer as there are
        write_course(home / f"{name}-fires.yml", name, {**case.common, **case.fires}, [expected(ALERTS[name])])
        write_course(home / f"{name}-quiet.yml", name, {**case.common, **case.quiet}, [])
    run = promtool("test", "rules", *home.glob("*-*.yml"))
    said = dict(part.split("\n", 1) for part in run.stdout.split("Unit Testing:  ")[1:])
    return {Path(path).stem: words.strip() or run.stderr for path, words in said.items()}


def expected(alert: Alert) -> dict[str, object]:
    labels = CASES[alert.name].labels
    summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: labels[m[1]], alert.summary)
    return {
        "exp_labels": {**labels, "severity": alert.severity},
        "exp_annotations": {"summary": summary, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
    }


def write_course(path: Path, name: str, series: Series, alerts: list[dict[str, object]]) -> None:
    course = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{CASES[name].at_minute}m", "alertname": name, "exp_alerts": alerts}],
    }
    content = {"rule_files": [f"{name}.yml"], "evaluation_interval": "1m", "tests": [course]}
    path.write_text(json.dumps(content))  # YAML holds JSON


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_on_its_bad_series_with_its_labels_and_text(name: str, told: dict[str, str]) -> None:
    assert told[f"{name}-fires"] == "SUCCESS"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_quiet_on_its_good_series(name: str, told: dict[str, str]) -> None:
    assert told[f"{name}-quiet"] == "SUCCESS"


def test_the_exported_metrics_pass_promtools_linter() -> None:
    tables = {f"{role}-0": WorkerTable.create(role, f"{role}-0", SloSection()) for role in METRICS}
    text = render(table_families(tables), {"node": "n", "model_name": "m"})
    for table in tables.values():
        table.close()
    run = promtool("check", "metrics", stdin=text)
    assert run.returncode == 0, run.stdout + run.stderr
