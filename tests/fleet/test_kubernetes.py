"""The manifests are whole, fit together and fit the node; Kubernetes' own kinds follow its published schemas.

ServiceMonitor and InferencePool are kinds of others, whose schemas no package brings: what is asked of them here is
what their reference pages require.
"""

import subprocess
from typing import Any

import pytest

from runtime.node.config_file import load_config
from runtime.node.metrics.exporter import VllmMetrics
from tests.fleet.balancers import program
from tests.fleet.manifests import BUILT_IN, FOLDER, manifest, picker_engine, picker_metrics

CONFIG = load_config(FOLDER / "node.toml")
POD: dict[str, Any] = manifest("statefulset")["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_manifest_follows_kubernetes_schema(name: str) -> None:
    command = [program("kubernetes-validate"), "--strict", str(FOLDER / f"{name}.yaml")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


def test_every_file_is_in_the_kustomization_and_exists() -> None:
    found = manifest("kustomization")
    named = [*found["resources"], *(file for made in found["configMapGenerator"] for file in made["files"])]
    own = {"kustomization.yaml", "Containerfile"}
    assert sorted(named) == sorted({path.name for path in FOLDER.iterdir()} - own)
    made = {made["name"] for made in found["configMapGenerator"]}
    used = {volume["configMap"]["name"] for volume in POD["spec"]["volumes"] if "configMap" in volume}
    assert used <= made
    assert CONTAINER["image"] in {image["name"] for image in found["images"]}


def test_all_selectors_match_the_pods_and_all_ports_match_the_node() -> None:
    labels, service = POD["metadata"]["labels"], manifest("service")
    pool, monitor = manifest("inferencepool")["spec"], manifest("servicemonitor")["spec"]
    for selector in (
        service["spec"]["selector"],
        manifest("statefulset")["spec"]["selector"]["matchLabels"],
        manifest("poddisruptionbudget")["spec"]["selector"]["matchLabels"],
        pool["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert manifest("statefulset")["spec"]["serviceName"] == service["metadata"]["name"]
    (port,), (exposed,) = CONTAINER["ports"], service["spec"]["ports"]
    assert port["containerPort"] == exposed["port"] == CONFIG.http.port
    assert [one["number"] for one in pool["targetPorts"]] == [CONFIG.http.port]
    assert [(one["port"], one["path"]) for one in monitor["endpoints"]] == [(exposed["name"], "/metrics")]


def test_probes_need_no_key_and_notice_a_drain_before_the_port_closes() -> None:
    assert "livenessProbe" not in CONTAINER
    for probe in (CONTAINER["startupProbe"], CONTAINER["readinessProbe"]):
        assert probe["httpGet"]["path"] in CONFIG.http.open_paths
    readiness = CONTAINER["readinessProbe"]
    assert readiness["periodSeconds"] * (readiness["failureThreshold"] + 1) < CONFIG.http.drain_notice_s
    assert POD["spec"]["terminationGracePeriodSeconds"] > CONFIG.node.drain_s


def test_the_pod_has_the_gpus_the_files_and_the_keys_that_its_node_uses() -> None:
    model = CONFIG.own_model
    assert model is not None
    devices = {device for role in (CONFIG.prefill, CONFIG.decode, CONFIG.pool) for device in role.devices}
    assert int(CONTAINER["resources"]["limits"]["nvidia.com/gpu"]) == len(devices)
    mounts = tuple(mount["mountPath"] + "/" for mount in CONTAINER["volumeMounts"])
    paths = [model.name, CONFIG.http.api_keys_file, *(one.path for one in CONFIG.collections), CONTAINER["command"][-1]]
    assert all(path.startswith(mounts) for path in paths)
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {one["name"] for one in POD["spec"]["volumes"]}


def test_the_endpoint_picker_uses_metrics_that_the_node_exports_once() -> None:
    assert POD["metadata"]["labels"]["llm-d.ai/engine-type"] == picker_engine()["name"]
    figures = (VllmMetrics.WAITING, VllmMetrics.RUNNING, VllmMetrics.KV_USED)
    assert sorted(picker_metrics()) == sorted(map(str, figures))
