"""Validation of a `[model]` with `engine = "vllm"`, as far as possible without running vLLM."""

import shutil

from runtime.errors import ConfigError
from runtime.node.engine_config import VllmSection, VllmStage
from runtime.node.placement.pool_placement import check_device

_CPU = "cpu"
_ONE_STAGE = ("instances", "tensor_parallel_size")


def check_vllm(section: VllmSection) -> None:
    """Raise `ConfigError` if the section is invalid."""
    if shutil.which(section.python) is None:
        raise ConfigError(f"model.python = {section.python!r}: no such program; give the python of vLLM's environment")
    _check_stages(section)
    lists = _device_lists(section)
    for key, devices, needs, count in lists:
        for device in devices:
            check_device(key, device)
        if devices in ((), (_CPU,)):
            continue
        if _CPU in devices:
            raise ConfigError(f'{key}: "cpu" cannot be combined with GPUs')
        if len(devices) != count:
            raise ConfigError(f"{key} has {len(devices)} entries: {needs} need {count}")
    named = [device for _, devices, _, _ in lists for device in devices if device != _CPU]
    if len(set(named)) < len(named):
        raise ConfigError(f"{' and '.join(key for key, _, _, _ in lists)} name{'s' * (len(lists) == 1)} a GPU twice")


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
    if section.devices and (prefill.devices or decode.devices):
        raise ConfigError("devices are set in model.devices or in [model.prefill] and [model.decode], not in both")
    on_cpu = {stage.devices == (_CPU,) for stage in (prefill, decode)}
    if bool(prefill.devices) != bool(decode.devices) or len(on_cpu) > 1:
        raise ConfigError("model.prefill.devices and model.decode.devices: set both, to GPUs or to the CPU")


def _device_lists(section: VllmSection) -> list[tuple[str, tuple[str, ...], str, int]]:
    """Return each list of devices: its key, its entries, and which instances need how many."""
    stages = section.stages
    if section.prefill is None or section.devices:
        needs = " and ".join(_needs(stage) for stage in stages.values())
        return [
            (
                "model.devices",
                section.devices,
                needs,
                sum(s.instances * s.tensor_parallel_size for s in stages.values()),
            )
        ]
    return [
        (f"model.{name}.devices", stage.devices, _needs(stage), stage.instances * stage.tensor_parallel_size)
        for name, stage in stages.items()
    ]


def _needs(stage: VllmStage) -> str:
    return f"{stage.instances} instances of {stage.tensor_parallel_size} GPUs (tensor_parallel_size)"
