"""Kill every process of fake vLLM instances under load; `python -m benchmarks.engines --kills` uses the real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engines.kills import PARTS, Target, kills, report
from tests.engines.test_vllm import VllmNode, fake_python

CONFIG = """
[node]
name = "kills"
run_dir = "run"
[http]
port = 0
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


@pytest.fixture
def node(tmp_path: Path) -> Iterator[VllmNode]:
    fake_python(tmp_path)
    node = VllmNode(tmp_path, CONFIG)
    node.ready()
    yield node
    node.end()


def test_no_request_of_100_is_lost_when_any_process_of_any_instance_is_killed(node: VllmNode) -> None:
    engines = ("engine-prefill-0", "engine-prefill-1", "engine-decode-2", "engine-decode-3")
    assert node.process.pid is not None
    target = Target(node.info.url, node.process.pid, engines, lambda name: node.worker(name).pid, node.ready)
    found = kills(target, "fake", streams=25, tokens=60)
    assert [wave.part for wave in found["waves"]] == list(PARTS)
    assert [wave.worker for wave in found["waves"]] == list(engines)
    assert [wave.lost for wave in found["waves"]] == [[], [], [], []]
    counts = {name: found[name] for name in ("asked", "lost", "different", "left", "hang")}
    assert counts == {"asked": 100, "lost": 0, "different": 0, "left": 0, "hang": 0}
    assert "100 requests in flight when a part of an instance was killed: 0 lost" in report(found)[0]
