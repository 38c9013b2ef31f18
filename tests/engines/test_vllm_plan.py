"""The plan of a node with vLLM: instances, stages, GPUs, ports and connectors."""

import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.engines.vllm.command import check_arguments, command, environment
from runtime.engines.vllm.transfer import check_transfer, transfer_config
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, parse_config
from runtime.node.engine_config import VllmSection
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine


def config(**model: Any) -> NodeConfig:
    return parse_config({"model": {"engine": "vllm", "name": "m", "python": sys.executable} | model})


def section(**model: object) -> VllmSection:
    made = config(**model).model
    assert isinstance(made, VllmSection)
    return made


def test_each_instance_has_gpus_of_its_own_in_order() -> None:
    made = config(instances=2, tensor_parallel_size=4)
    first, second = lay_out(made, Machine.with_simulated_gpus(8)).of_role("engine")
    assert first.gpu_numbers == ("0", "1", "2", "3")
    assert second.gpu_numbers == ("4", "5", "6", "7")
    assert second.visible_devices == "4,5,6,7"
    assert second.shown_device == "cuda:4,5,6,7"
    assert second.is_on("cuda:6")
    assert not first.is_on("cuda:6")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"instances": 2, "devices": ["cuda:0"]}, "model.devices has 1 entries: 2 instances of 1 GPUs"),
        ({"devices": ["cpu", "cuda:0"], "instances": 2}, '"cpu" cannot be combined with GPUs'),
        ({"devices": ["cuda:0", "cuda:0"], "instances": 2}, "names a GPU twice"),
        ({"devices": ["gpu0"]}, "'gpu0' is not a device"),
        ({"python": "/nowhere/python"}, "no such program"),
    ],
)
def test_an_invalid_plan_is_refused_with_its_key(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lay_out(config(**model))


def test_a_run_directory_too_long_for_a_socket_path_is_refused() -> None:
    raw = {"node": {"run_dir": "/tmp/" + "d" * 100}, "model": {"engine": "vllm", "name": "m", "python": sys.executable}}
    with pytest.raises(ConfigError, match=r"Linux allows 107: give a shorter node\.run_dir"):
        lay_out(parse_config(raw))


def test_paths_are_distinguished_from_hub_names() -> None:
    assert section(path="Qwen/Qwen3-8B").loads == "Qwen/Qwen3-8B"
    with pytest.raises(ConfigError, match="did you mean 'tensor_parallel_size'"):
        config(tensor_parallel=2)


# ---- prefill and decode apart

STAGES = {"prefill": {"instances": 2}, "decode": {"tensor_parallel_size": 2, "extra_args": ["--max-num-seqs", "64"]}}


def test_each_stage_has_separate_sizes_gpus_and_arguments() -> None:
    made = config(**STAGES, extra_args=["--dtype", "float16"])
    plan = lay_out(made, Machine.with_simulated_gpus(8))
    engines = plan.of_role("engine")
    assert [(place.name, place.gpu_numbers) for place in engines] == [
        ("engine-prefill-0", ("0",)),
        ("engine-prefill-1", ("1",)),
        ("engine-decode-2", ("2", "3")),
    ]
    of_decode = list(command(section(**STAGES, extra_args=["--dtype", "float16"]), plan, engines[2], nixl=True))
    assert of_decode[-4:] == ["--dtype", "float16", "--max-num-seqs", "64"]
    assert of_decode[of_decode.index("--tensor-parallel-size") + 1] == "2"
    assert {"--enable-prompt-tokens-details", "--block-size"}.isdisjoint(of_decode), "vLLM knows its GPU"


def test_the_vllm_command_sets_connector_role_and_recompute_policy() -> None:
    plan = lay_out(config(**STAGES), Machine.with_simulated_gpus(4))
    prefill, _, decode = plan.of_role("engine")
    assert transfer_config(plan, prefill, nixl=True) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
    }
    assert transfer_config(plan, decode, nixl=True)["kv_role"] == "kv_consumer"
    files = transfer_config(plan, prefill, nixl=False)
    assert (files["kv_connector"], files["kv_connector_module_path"]) == ("TrinityKvFiles", "trinity_kv_files")
    assert files["kv_connector_extra_config"]["directory"] == f"{plan.run_dir}/kv"
    own = section(**STAGES, extra_args=["--kv-transfer-config", '{"kv_connector": "Mine"}'])
    check_arguments(own)
    check_transfer(own, nixl=False)  # of any parallel sizes
    given = list(command(own, plan, prefill, nixl=True))
    assert given.count("--kv-transfer-config") == 1
    assert given[-1] == '{"kv_connector": "Mine"}'


def test_each_instance_has_its_own_nixl_port_and_our_connector_on_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    made = section(**STAGES)
    plan = lay_out(config(**STAGES), Machine.with_simulated_gpus(4))
    found = [environment(made, plan, place) for place in plan.of_role("engine")]
    assert len({variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] for variables in found}) == 3
    first, plugins = found[0]["PYTHONPATH"].split(":")
    assert first == "/elsewhere"
    assert (Path(plugins) / "trinity_kv_files.py").is_file()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"prefill": {}}, r"\[model.prefill\] without \[model.decode\]"),
        ({"prefill": {}, "decode": {}, "instances": 2}, r"model.instances = 2: with \[model.prefill\]"),
        (
            {"prefill": {"instances": 2}, "decode": {}, "devices": ["cuda:0", "cuda:1"]},
            "model.devices has 2 entries: 2 instances of 1 GPUs and 1 instances of 1 GPUs",
        ),
    ],
)
def test_incompatible_stages_are_refused_with_their_keys(model: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lay_out(config(**model))


def test_stages_that_cannot_exchange_kv_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="the same parallel size in both stages: install NIXL"):
        check_transfer(section(**STAGES), nixl=False)
    check_transfer(section(**STAGES), nixl=True)
    with pytest.raises(ConfigError, match=r"model\.decode\.extra_args: --kv-transfer-config must be given to both"):
        check_transfer(section(prefill={}, decode={"extra_args": ["--kv-transfer-config={}"]}), nixl=True)
    check_arguments(section(extra_args=["--kv-transfer-config", "{}"]))  # instances that do all: a cache, say
