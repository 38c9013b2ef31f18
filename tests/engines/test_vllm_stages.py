"""Separate prefill and decode instances of a fake vLLM that rejects what vLLM's connectors would reject."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from runtime.node.supervisor.admin import restart_node
from runtime.testing.waiting import eventually
from tests.engines.test_vllm import WAIT_S, VllmNode, all_whole, asked, fake_python, fetch
from tests.node.tiny_node import gone

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
    for line in fetch(f"{node.info.url}/metrics").text.splitlines():
        if line.startswith("vllm:fake_kv_total"):
            name = next(name for name in NAMES if f'worker="{name}"' in line)
            found[name] = found.get(name, 0) + int(float(line.split()[-1]))
    return found


def test_prefill_instances_compute_prompts_and_decode_instances_generate(node: VllmNode) -> None:
    def counted(prompts: int) -> None:
        eventually(
            lambda: sum(handed_over(node).values()) == 2 * prompts, WAIT_S, f"the metrics of {prompts} hand-overs"
        )

    with node.held():  # a prompt that ends before the next begins is no reason for another decode instance
        askers = asked(node, 6, tokens=50)
    all_whole(askers)
    for prompts in range(6, 36, 6):
        counted(prompts)
        if all(handed_over(node).values()):
            break
        all_whole(asked(node, 6, first=prompts, tokens=50))
    assert all(handed_over(node).values())
    log = (node.home / "run" / "logs" / "engine-prefill-0.log").read_text()
    assert "--enable-prompt-tokens-details" in log


def restart_in_turn(node: VllmNode, names: Sequence[str]) -> None:
    for name in names:
        restart_node(node.info, name, WAIT_S)


def test_a_rolling_restart_of_both_stages_loses_no_request(node: VllmNode) -> None:
    restarted = NAMES[::2]
    cores = {node.core(name) for name in restarted}
    with ThreadPoolExecutor(1) as thread:
        with node.held():
            askers = asked(node, 12)
            restarting = thread.submit(restart_in_turn, node, restarted)
            eventually(lambda: node.worker(restarted[1]).phase == "draining", WAIT_S, "the drain of a decode instance")
        all_whole(askers)
        restarting.result()
    assert not cores & {node.core(name) for name in restarted}
    assert "retried after" not in node.log.read_text()  # a drained instance finishes what it has


def test_killing_any_process_of_either_stage_loses_no_request_and_leaves_no_process(node: VllmNode) -> None:
    for name, victim in zip(NAMES, ("server", "watchdog", "core", "worker"), strict=True):
        worker = node.worker(name).pid
        watchdog = next(child.pid for child in psutil.Process(worker).children() if child.name() == "sh")
        pids = {"server": node.server(name), "watchdog": watchdog, "core": node.core(name), "worker": worker}
        with node.held():
            askers = asked(node, 12)
            os.kill(pids[victim], signal.SIGKILL)
        all_whole(askers)
        eventually(lambda pids=pids: all(map(gone, pids.values())), WAIT_S, "the old processes to be gone")  # type: ignore[misc]
        eventually(lambda name=name: node.worker(name).restarts == 1, WAIT_S, f"a restart of {name}")  # type: ignore[misc]
        node.ready()  # only now: the supervisor takes the worker for a ready one until it has seen its end
        assert node.core(name) != pids["core"]
    assert "retried after" in node.log.read_text()
