"""KV transfer between vLLM's prefill and decode instances: choice of the connector and its options.

The fields in requests are in `runtime.engines.openai.handover`.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.node.engine_config import VllmSection
from runtime.node.placement.plan import NodePlan, WorkerPlan

NIXL = "NixlConnector"
FILES = "TrinityKvFiles"

_PLUGINS = Path(__file__).parent / "plugins"
_FILES_MODULE = "trinity_kv_files"
_LEASE_S = 60.0  # after which a file that no decode instance has read is removed
_NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def select_connector(section: VllmSection, *, nixl: bool) -> str:
    """Return the connector's name. `nixl`: vLLM's environment has NIXL."""
    if section.kv_connector != "auto":
        return section.kv_connector
    return NIXL if nixl else FILES


def check_transfer(section: VllmSection, *, nixl: bool) -> None:
    """Raise `ConfigError` for a connector that does not support the configuration."""
    if section.prefill is None or section.decode is None:
        return
    connector = select_connector(section, nixl=nixl)
    if connector == NIXL and not nixl:
        raise ConfigError(
            f"model.kv_connector = {NIXL!r}: NIXL is not installed at {section.python!r}: "
            f"`{section.python} -m pip install nixl`"
        )
    sizes = [stage.tensor_parallel_size for stage in (section.prefill, section.decode)]
    if connector == FILES and sizes[0] != sizes[1]:
        raise ConfigError(
            f"model.kv_connector = {section.kv_connector!r} is {FILES} here, which needs the same parallel size in "
            f"both stages: install NIXL (`{section.python} -m pip install nixl`), or give both "
            "stages the same tensor_parallel_size"
        )


def transfer_config(section: VllmSection, plan: NodePlan, place: WorkerPlan, *, nixl: bool) -> dict[str, Any]:
    """Return an instance's `--kv-transfer-config`. KV that does not arrive is recomputed by the decode instance."""
    connector = select_connector(section, nixl=nixl)
    found: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": _ROLES[place.stage],
        "kv_load_failure_policy": "recompute",
    }
    options: dict[str, Any] = {}
    if ":" in connector:
        found["kv_connector_module_path"], _, found["kv_connector"] = connector.partition(":")
    elif connector == FILES:
        found["kv_connector_module_path"] = _FILES_MODULE
        options = {"directory": str(plan.kv_directory), "owner": place.name, "lease_s": _LEASE_S}
    return found | {"kv_connector_extra_config": options | section.kv_connector_extra_config}


def transfer_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an instance that transfers KV: the path of our connector, and a port for NIXL."""
    path = os.pathsep.join(part for part in (given.get("PYTHONPATH"), str(_PLUGINS)) if part)
    return {"PYTHONPATH": path} | ({} if _NIXL_PORT in given else {_NIXL_PORT: str(_free_port())})


def remove_files(plan: NodePlan, place: WorkerPlan) -> None:
    """Remove the KV files of an instance: those of an earlier process may be invalid, and later ones are never read."""
    for file in plan.kv_directory.glob(f"{place.name}-*"):
        file.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
