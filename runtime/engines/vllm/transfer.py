"""How KV gets from prefill to decode: which connector, and what vLLM is told of it at start.

What is said of it in requests is in `runtime.engines.openai.handover`.
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
_LEASE_S = 60.0  # that a file is kept for a decode instance that never reads it: one that died, mostly
_NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def connector_of(section: VllmSection, *, nixl: bool) -> str:
    """The connector by its name. `nixl`: vLLM's environment has NIXL."""
    if section.kv_connector != "auto":
        return section.kv_connector
    return NIXL if nixl else FILES


def check_transfer(section: VllmSection, *, nixl: bool) -> None:
    """Raises `ConfigError` for a connector that cannot do what is configured."""
    if section.prefill is None or section.decode is None:
        return
    connector = connector_of(section, nixl=nixl)
    if connector == NIXL and not nixl:
        raise ConfigError(
            f"model.kv_connector = {NIXL!r}: there is no NIXL at {section.python!r}: "
            f"`{section.python} -m pip install nixl`"
        )
    sizes = [(stage.tensor_parallel_size, stage.pipeline_parallel_size) for stage in (section.prefill, section.decode)]
    if connector == FILES and sizes[0] != sizes[1]:
        raise ConfigError(
            f"model.kv_connector = {section.kv_connector!r} is {FILES} here, which hands KV over between instances of "
            f"the same parallel sizes alone: install NIXL (`{section.python} -m pip install nixl`), or give both "
            "stages the same tensor_parallel_size and pipeline_parallel_size"
        )


def transfer_config(section: VllmSection, plan: NodePlan, place: WorkerPlan, *, nixl: bool) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` of an instance. KV that does not arrive is computed where it was wanted."""
    connector = connector_of(section, nixl=nixl)
    found: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": _ROLES[place.stage],
        "kv_load_failure_policy": "recompute",
    }
    options: dict[str, Any] = {}
    if section.kv_connector_module_path:
        found["kv_connector_module_path"] = section.kv_connector_module_path
    elif connector == FILES:
        found["kv_connector_module_path"] = _FILES_MODULE
        options = {"directory": str(plan.kv_directory), "owner": place.name, "lease_s": _LEASE_S}
    return found | {"kv_connector_extra_config": options | section.kv_connector_extra_config}


def transfer_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Variables of an instance that hands KV over: where our connector is, and a port of its own for NIXL."""
    path = os.pathsep.join(part for part in (given.get("PYTHONPATH"), str(_PLUGINS)) if part)
    return {"PYTHONPATH": path} | ({} if _NIXL_PORT in given else {_NIXL_PORT: str(_free_port())})


def remove_files(plan: NodePlan, place: WorkerPlan) -> None:
    """Remove what an instance left for others that it cannot vouch for any more, or that nobody will read."""
    for file in plan.kv_directory.glob(f"{place.name}-*"):
        file.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
