"""KV transfer between vLLM's prefill and decode instances.

The fields in requests are in `runtime.engines.openai.handover`.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.node.engine_config import Stage, VllmSection
from runtime.node.placement.plan import NodePlan, WorkerPlan

TRANSFER = "--kv-transfer-config"
NIXL = "NixlConnector"
FILES = "TrinityKvFiles"

_PLUGINS = Path(__file__).parent / "plugins"
_FILES_MODULE = "trinity_kv_files"
_LEASE_S = 60.0  # after which a file that no decode instance has read is removed
_NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def has_own_transfer(section: VllmSection, stage: Stage) -> bool:
    """Whether the extra arguments of a stage configure the transfer of KV."""
    arguments = (*section.extra_args, *section.stages[stage].extra_args)
    return any(argument.partition("=")[0].replace("_", "-") == TRANSFER for argument in arguments)


def check_transfer(section: VllmSection, *, nixl: bool) -> None:
    """Raise `ConfigError` if KV cannot be transferred between the stages. `nixl`: vLLM's environment has NIXL."""
    if section.prefill is None or section.decode is None:
        return
    own = [stage for stage in section.stages if has_own_transfer(section, stage)]
    if len(own) == 1:
        raise ConfigError(f"model.{own[0]}.extra_args: {TRANSFER} must be given to both stages, or to none")
    sizes = [stage.tensor_parallel_size for stage in (section.prefill, section.decode)]
    if not own and not nixl and sizes[0] != sizes[1]:
        raise ConfigError(
            f"model: KV is transferred by {FILES} here, which needs the same parallel size in both stages: install "
            f"NIXL (`{section.python} -m pip install nixl`), or give both stages the same tensor_parallel_size"
        )


def transfer_config(plan: NodePlan, placement: WorkerPlan, *, nixl: bool) -> dict[str, Any]:
    """Return an instance's `--kv-transfer-config`. KV that does not arrive is recomputed by the decode instance."""
    config: dict[str, Any] = {"kv_role": _ROLES[placement.stage], "kv_load_failure_policy": "recompute"}
    if nixl:
        return config | {"kv_connector": NIXL}
    options = {"directory": str(plan.kv_directory), "owner": placement.name, "lease_s": _LEASE_S}
    files = {"kv_connector": FILES, "kv_connector_module_path": _FILES_MODULE}
    return config | files | {"kv_connector_extra_config": options}


def transfer_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an instance that transfers KV: the path of our connector, and a port for NIXL."""
    path = os.pathsep.join(part for part in (given.get("PYTHONPATH"), str(_PLUGINS)) if part)
    return {"PYTHONPATH": path} | ({} if _NIXL_PORT in given else {_NIXL_PORT: str(_free_port())})


def remove_files(plan: NodePlan, placement: WorkerPlan) -> None:
    """Remove the KV files of an instance: those of an earlier process may be invalid, and later ones are never read."""
    for file in plan.kv_directory.glob(f"{placement.name}-*"):
        file.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
