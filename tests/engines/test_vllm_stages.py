"""Separate prefill and decode instances of a fake vLLM that rejects what vLLM's connectors would reject."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from runtime.engines.vllm.command import check_arguments, command, environment
from runtime.engines.vllm.transfer import check_transfer, transfer_config
from runtime.errors import ConfigError
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.supervisor.admin import restart_node
from runtime.testing.waiting import eventually
from tests.engines.test_vllm import VllmNode, all_whole, asked, config, fake_python, gone
from tests.engines.test_vllm_setup import section

CONFIG = """
[node]
name = "split"
run_dir = "run"
drain_s = 600
[http]
port = 0
drain_notice_s = 0
[model]
engine = "vllm"
name = "fake"
python = "./python"
devices = ["cpu"]
environment = { FAKE_PACE_S = "0.02" }
[model.prefill]
instances = 2
[model.decode]
instances = 2
"""
NAMES = ("engine-prefill-0", "engine-prefill-1", "engine-decode-2", "engine-decode-3")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmNode]:
    home = tmp_path_factory.mktemp("split")
    fake_python(home)
    node = VllmNode(home, CONFIG)
    node.ready()
    yield node
    node.end()


def handed_over(node: VllmNode) -> dict[str, int]:
    """Return, by worker, the number of prompts computed for others or pulled from others."""
    found: dict[str, int] = {}
    for line in httpx.get(f"{node.info.url}/metrics").text.splitlines():
        if line.startswith("vllm:fake_kv_total"):
            name = next(name for name in NAMES if f'worker="{name}"' in line)
            found[name] = found.get(name, 0) + int(float(line.split()[-1]))
    return found


def test_prefill_instances_compute_prompts_and_decode_instances_generate(node: VllmNode) -> None:
    all_whole(asked(node, 6, tokens=50))
    eventually(lambda: sum(handed_over(node).values()) == 12, 60, "the metrics of 6 hand-overs")
    assert all(count for count in handed_over(node).values())
    log = (node.home / "run" / "logs" / "engine-prefill-0.log").read_text()
    assert "--enable-prompt-tokens-details" in log


def test_a_rolling_restart_of_both_stages_loses_no_request(node: VllmNode) -> None:
    restarted = NAMES[::2]
    cores = {node.core(name) for name in restarted}
    askers = asked(node, 12, tokens=100)
    for name in restarted:
        restart_node(node.info, name, timeout_s=120)
    all_whole(askers)
    assert not cores & {node.core(name) for name in restarted}
    assert "retried after" not in node.log.read_text()  # a drained instance finishes what it has


def test_killing_any_process_of_either_stage_loses_no_request_and_leaves_no_process(node: VllmNode) -> None:
    for name, victim in zip(NAMES, ("server", "watchdog", "core", "worker"), strict=True):
        worker = node.worker(name).pid
        watchdog = next(child.pid for child in psutil.Process(worker).children() if child.name() == "sh")
        pids = {"server": node.server(name), "watchdog": watchdog, "core": node.core(name), "worker": worker}
        askers = asked(node, 12, tokens=100)
        os.kill(pids[victim], signal.SIGKILL)
        all_whole(askers)
        eventually(lambda pids=pids: all(map(gone, pids.values())), 60, "the old processes to be gone")  # type: ignore[misc]
        node.ready()


# ---- the plan


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
    assert "--enable-prompt-tokens-details" not in of_decode


def test_devices_are_assigned_to_stages_in_order() -> None:
    stages = {"prefill": {"devices": ["cuda:5"]}, "decode": {"instances": 2, "devices": ["cuda:1", "cuda:7"]}}
    engines = lay_out(config(**stages), Machine.with_simulated_gpus(8)).of_role("engine")
    assert [place.gpu_numbers for place in engines] == [("5",), ("1",), ("7",)]


def test_the_vllm_command_sets_connector_role_and_recompute_policy() -> None:
    made = section(**STAGES)
    plan = lay_out(config(**STAGES), Machine.with_simulated_gpus(4))
    prefill, _, decode = plan.of_role("engine")
    assert transfer_config(made, plan, prefill, nixl=True) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }
    assert transfer_config(made, plan, decode, nixl=True)["kv_role"] == "kv_consumer"
    files = transfer_config(made, plan, prefill, nixl=False)
    assert (files["kv_connector"], files["kv_connector_module_path"]) == ("TrinityKvFiles", "trinity_kv_files")
    assert files["kv_connector_extra_config"]["directory"] == f"{plan.run_dir}/kv"
    own = section(**STAGES, kv_connector="mine:Mine", kv_connector_extra_config={"a": 1})
    found = transfer_config(own, plan, prefill, nixl=True)
    assert (found["kv_connector"], found["kv_connector_module_path"]) == ("Mine", "mine")
    assert found["kv_connector_extra_config"] == {"a": 1}


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
        ({"prefill": {"devices": ["cpu"]}, "decode": {}}, "set both, to GPUs or to the CPU"),
        ({"prefill": {"devices": ["cpu"]}, "decode": {"devices": ["cuda:0"]}}, "set both, to GPUs"),
        (
            {"prefill": {"devices": ["cuda:0"]}, "decode": {"devices": ["cuda:0"]}},
            r"model.prefill.devices and model.decode.devices name a GPU twice",
        ),
        (
            {"prefill": {"devices": ["cuda:0"]}, "decode": {}, "devices": ["cuda:1"]},
            "devices are set in model.devices",
        ),
        (
            {"prefill": {"instances": 2, "devices": ["cuda:0"]}, "decode": {"devices": ["cuda:1"]}},
            r"model.prefill.devices has 1 entries: 2 instances of 1 GPUs .* need 2",
        ),
    ],
)
def test_incompatible_stages_are_refused_with_their_keys(model: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lay_out(config(**model))


def test_an_unsupported_connector_is_refused_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match="the same parallel sizes in both stages: install NIXL"):
        check_transfer(section(**STAGES), nixl=False)
    check_transfer(section(**STAGES), nixl=True)
    with pytest.raises(ConfigError, match="NIXL is not installed at"):
        check_transfer(section(**STAGES, kv_connector="NixlConnector"), nixl=False)
    with pytest.raises(ConfigError, match=r"model\.decode\.extra_args: '--kv-transfer-config'"):
        check_arguments(section(prefill={}, decode={"extra_args": ["--kv-transfer-config", "{}"]}))
    check_arguments(section(extra_args=["--kv-transfer-config", "{}"]))  # instances that do all: a cache, say
