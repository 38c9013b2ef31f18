"""Validation of a `[model]` with `engine = "vllm"`, as far as possible without running vLLM."""

import shutil

from runtime.errors import ConfigError
from runtime.node.engine_config import VllmSection
from runtime.node.placement.pool_placement import check_device

_CPU = "cpu"
_ONE_STAGE = ("instances", "tensor_parallel_size")


def check_vllm(section: VllmSection) -> None:
    """Raise `ConfigError` if the section is invalid."""
    if shutil.which(section.python) is None:
        raise ConfigError(f"model.python = {section.python!r}: no such program; give the python of vLLM's environment")
    _check_stages(section)
    for device in section.devices:
        check_device("model.devices", device)
    if section.devices in ((), (_CPU,)):
        return
    if _CPU in section.devices:
        raise ConfigError('model.devices: "cpu" cannot be combined with GPUs')
    stages = section.stages.values()
    if len(section.devices) != sum(stage.instances * stage.tensor_parallel_size for stage in stages):
        needs = " and ".join(f"{s.instances} instances of {s.tensor_parallel_size} GPUs" for s in stages)
        raise ConfigError(f"model.devices has {len(section.devices)} entries: {needs} (tensor_parallel_size)")
    if len(set(section.devices)) < len(section.devices):
        raise ConfigError("model.devices names a GPU twice")


def _check_stages(section: VllmSection) -> None:
    prefill, decode = section.prefill, section.decode
    if (prefill is None) != (decode is None):
        given, missing = ("prefill", "decode") if decode is None else ("decode", "prefill")
        raise ConfigError(
            f"[model.{given}] without [model.{missing}]: give both, or neither for instances that serve whole requests"
        )
    if prefill is None or decode is None:
        return
    for key in _ONE_STAGE:
        if getattr(section, key) != 1:
            raise ConfigError(
                f"model.{key} = {getattr(section, key)}: with [model.prefill] and [model.decode], set it there"
            )
