"""A real Prometheus that scrapes a node, for tests."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from runtime.testing.waiting import eventually
from tests.dashboards.tools import tool
from tests.fleet.balancers import free_port

CONFIG = """
global:
  scrape_interval: {interval_ms}ms
  evaluation_interval: {interval_ms}ms
rule_files: ["{rules}"]
scrape_configs:
- job_name: trinity
  static_configs:
  - targets: ["{target}"]
"""


class Prometheus:
    """A Prometheus process; `close` ends it."""

    def __init__(self, home: Path, target: str, rules: str, interval_ms: int = 500) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        (home / "rules.yml").write_text(rules)
        config = home / "prometheus.yml"
        config.write_text(CONFIG.format(interval_ms=interval_ms, rules=home / "rules.yml", target=target))
        self.log = home / "prometheus.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    tool("prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={home / 'tsdb'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            eventually(self._is_ready, 120, f"Prometheus to be ready; log:\n{self.log.read_text()}")
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, f"Prometheus ended:\n{self.log.read_text()}"
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query: `metric` and `value`."""
        data = urllib.parse.urlencode({"query": expr}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", data, timeout=60) as answer:
                return list(json.loads(answer.read())["data"]["result"])
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{expr}: {error.read().decode()}") from error

    def values(self, expr: str) -> list[float]:
        return [float(series["value"][1]) for series in self.query(expr)]

    def names(self) -> set[str]:
        """Return the names of all scraped metrics."""
        with urllib.request.urlopen(f"{self.url}/api/v1/label/__name__/values", timeout=60) as answer:
            return set(json.loads(answer.read())["data"])

    def firing(self, name: str) -> list[dict[str, str]]:
        """Return the labels of the alert's firing instances."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=60) as answer:
            alerts = json.loads(answer.read())["data"]["alerts"]
        return [a["labels"] for a in alerts if a["state"] == "firing" and a["labels"]["alertname"] == name]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=60)
