"""The committed Kubernetes manifests."""

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # transformers brings it, without types

FOLDER = Path(__file__).parents[2] / "launchers" / "fleet" / "kubernetes"
BUILT_IN = ("service", "statefulset", "poddisruptionbudget")


def manifest(name: str) -> Any:
    """Return one file's documents."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def picker_engine() -> dict[str, str]:
    """Return the metrics configuration of llm-d's endpoint picker."""
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in manifest("picker")["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert plugins["core-metrics-extractor"]["defaultEngine"] == engine["name"]
    return dict(engine)


def picker_metrics() -> list[str]:
    """Return the names of the metrics that the endpoint picker uses."""
    return [value for key, value in picker_engine().items() if key.endswith("Spec")]
