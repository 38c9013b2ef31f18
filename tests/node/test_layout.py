"""Layout of workers on GPUs: selection by index, UUID or MIG id, NUMA-local cores, one visible GPU per worker."""

import io
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from launchers.status import show_placement
from runtime.checks.gpu_sharing import shared_gpus
from runtime.checks.memory_estimate import Need
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, parse_config
from runtime.node.config_file import load_config
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import NodePlan, WorkerPlan

NODE8 = Path(__file__).parents[2] / "launchers" / "node8.toml"
GIB = 1 << 30


def gpu(number: int, node: int | None = None) -> Gpu:
    uuid = f"GPU-{number:08x}-0000-0000-0000-000000000000"
    return Gpu(str(number), uuid, "NVIDIA H100", f"0000:{number:02x}:00.0", 80 * GIB, 70 * GIB, node)


def machine(gpus: int = 8, cores: int = 32, nodes: int = 2) -> Machine:
    """Build a machine with GPUs and cores spread evenly over NUMA nodes; nodes = 0: unknown."""
    node_cores = {n: tuple(range(n * cores // nodes, (n + 1) * cores // nodes)) for n in range(nodes)}
    found = tuple(gpu(n, n * nodes // gpus if nodes else None) for n in range(gpus))
    return Machine(found, tuple(range(cores)), 64 * GIB, node_cores)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    """Two pool workers."""
    return parse_config(
        {
            "pool": {"workers": 2, "devices": ["cuda:6", "cuda:7"]},
            "collections": [{"name": "docs", "path": str(tmp_path)}],
        }
    )


def placement_text(plan: NodePlan, here: Machine, needs: Mapping[str, Need] = {}) -> str:
    """Return what `serve --dry-run` prints of a plan."""
    output = io.StringIO()
    show_placement(plan, here, needs, Console(file=output))
    return output.getvalue()


def pools(plan: NodePlan) -> list[WorkerPlan]:
    return list(plan.of_role("pool"))


def test_a_pool_is_exclusive_on_a_gpu_without_other_workers(config: NodeConfig, tmp_path: Path) -> None:
    assert [one.exclusive_gpu for one in pools(lay_out(config, machine()))] == [True, True]
    docs = [{"name": "docs", "path": str(tmp_path)}]
    for devices, alone in ((["cuda:0", "cuda:3"], False), (["cuda:1", "cuda:2"], True), (["cpu"], False)):
        pool = {"workers": 1, "devices": devices[:1]}
        model = {"model": {"name": "smollm2-135m-instruct"}, "prefill": {"devices": ["cuda:0"]}}
        raw = {"pool": pool, "collections": docs, **model, "decode": {"devices": ["cuda:3"]}}
        plan = lay_out(parse_config(raw), machine())
        assert [one.exclusive_gpu for one in pools(plan)] == [alone], devices
        assert not any(one.exclusive_gpu for one in plan.workers if one.role != "pool")
    twice = {"pool": {"workers": 2, "devices": ["cuda:6"]}, "collections": docs}
    assert [one.exclusive_gpu for one in pools(lay_out(parse_config(twice), machine()))] == [False, False]


def test_an_unknown_gpu_is_refused_with_the_available_ones(config: NodeConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"pool\.devices: 'cuda:6' is not a GPU of this machine; available: 0 \(GPU-0"
    ) as caught:
        lay_out(config, machine(gpus=2))
    assert gpu(1).uuid in caught.value.message


def test_a_missing_driver_is_reported_with_the_reason(config: NodeConfig) -> None:
    bare = Machine((), (0, 1), GIB, missing="NVML: Driver Not Loaded")
    with pytest.raises(ConfigError, match="NVML: Driver Not Loaded"):
        lay_out(config, bare)


MIG = Gpu("6:0", "MIG-11111111", "MIG 1g.10gb", "0000:06:00.0", 10 * GIB, 10 * GIB)
CUT = Machine((*machine().gpus, MIG), tuple(range(32)), GIB)


def test_a_gpu_in_mig_mode_must_be_named_by_instance(config: NodeConfig) -> None:
    with pytest.raises(ConfigError, match="select one of MIG-11111111"):
        lay_out(config, CUT)


def test_a_model_on_a_mig_instance_is_refused_without_cuda_ipc(tmp_path: Path) -> None:
    raw = {"model": {"name": "m"}, "prefill": {"devices": ["cuda:0"]}, "decode": {"devices": ["MIG-11111111"]}}
    with pytest.raises(ConfigError, match=r"decode\.devices: MIG-11111111 is a MIG instance, which has no CUDA IPC"):
        lay_out(parse_config(raw), CUT)


def test_the_eight_gpu_layout_gives_each_process_one_visible_gpu(tmp_path: Path) -> None:
    plan = lay_out(node8(tmp_path), machine())
    placed = [worker for worker in plan.workers if worker.role != "frontend"]
    assert [worker.visible_devices for worker in placed] == [gpu(n).uuid for n in (6, 7, 0, 1, 2, 3, 4, 5)]
    assert {worker.device for worker in placed} == {"cuda:0"}
    text = placement_text(plan, machine(), {"prefill-0": Need(0, 3 * GIB), "decode-0": Need(0, 69 * GIB)})
    for words in ("prefill-0", gpu(6).uuid, "0000:06:00.0", "3,072 MiB", "70,656 MiB", "71,680 MiB"):
        assert words in text, text


def test_spinning_workers_get_exclusive_cores_on_their_gpus_numa_node(config: NodeConfig) -> None:
    plan = lay_out(config, machine())
    first, second = pools(plan)
    assert (first.numa_node, second.numa_node) == (1, 1)
    assert set(first.cores) | set(second.cores) <= set(range(16, 32))
    assert not set(first.cores) & set(second.cores)
    assert first.spin
    assert second.spin


def test_an_unknown_numa_node_is_not_guessed(config: NodeConfig) -> None:
    first, _ = pools(lay_out(config, machine(nodes=0)))
    assert first.numa_node is None
    assert first.spin


def node8(tmp_path: Path) -> NodeConfig:
    (tmp_path / "my-docs").mkdir()
    path = tmp_path / "node8.toml"
    path.write_text(NODE8.read_text())
    return load_config(path)


def near(tmp_path: Path, placement: str, **more: Any) -> NodeConfig:
    """One prefill and two decode workers, each on a GPU of its own."""
    tables = {
        "model": {"name": "m"},
        "prefill": {"devices": ["cuda:0"]},
        "decode": {"workers": 2, "devices": ["cuda:1", "cuda:2"]},
        "collections": [{"name": "docs", "path": str(tmp_path)}],
    }
    return parse_config(tables | {"pool": {"placement": placement}} | more)


@pytest.mark.parametrize(
    ("placement", "beside"),
    [
        ("with-prefill", {"pool-0": "prefill-0"}),
        ("with-decode", {"pool-0": "decode-0", "pool-1": "decode-1"}),
        ("coupled", {"pool-0": "prefill-0", "pool-1": "decode-0", "pool-2": "decode-1"}),
    ],
)
@pytest.mark.parametrize("here", [machine(), Machine.with_simulated_gpus(3)])
def test_a_coupled_pool_is_on_its_workers_gpu_with_separate_cores(
    tmp_path: Path, placement: str, beside: dict[str, str], here: Machine
) -> None:
    plan = lay_out(near(tmp_path, placement), here)
    workers = {worker.name: worker for worker in plan.workers}
    assert {name: worker.paired_with for name, worker in workers.items() if worker.role == "pool"} == beside
    for number, (pool, worker) in enumerate(beside.items()):
        assert workers[pool].gpu == workers[worker].gpu != ""
        assert not set(workers[pool].cores) & set(workers[worker].cores)
        assert plan.local_pools(worker) == (number,)
    assert plan.local_pools("frontend-0") == ()
    assert plan.config.pool.workers == len(beside)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=NodePlan) == plan  # as workers are told of it
    text = placement_text(plan, here)
    assert all(f"{pool} beside {worker}" in text for pool, worker in beside.items())


def test_on_a_cpu_a_coupled_pool_shares_its_workers_cores_and_does_not_spin(tmp_path: Path) -> None:
    core = Machine.read().cores[0]
    on_cpu = {"prefill": {"cores": [[core]]}, "decode": {"workers": 2, "cores": [[core]]}}
    plan = lay_out(near(tmp_path, "coupled", **on_cpu), Machine.read())
    assert [(pool.cores, pool.spin) for pool in pools(plan)] == [((core,), False)] * 3
    simulated = replace(Machine.with_simulated_gpus(3), cores=tuple(range(64)))
    assert not any(pool.spin for pool in pools(lay_out(near(tmp_path, "coupled"), simulated)))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"pool": {"placement": "coupled", "workers": 2}},
            'pool.workers = 2 with pool.placement = "coupled", which sets it to 3 (one beside each prefill and decode '
            "worker): remove it",
        ),
        (
            {"pool": {"placement": "with-decode", "devices": ["cuda:7"]}},
            'pool.devices = ["cuda:7"] with pool.placement = "with-decode", which sets it to ["cuda:1","cuda:2"]',
        ),
        (
            {"decode": {"workers": 8, "devices": ["cuda:1"]}},
            'pool.placement = "coupled": 9 pool workers, one beside each prefill and decode worker; the limit is 8',
        ),
        ({"decode": {"workers": 2, "devices": ["cuda:1"] * 3}}, "decode.devices has 3 entries for decode.workers = 2"),
        (
            {"model": {"engine": "openai", "name": "m", "url": "http://127.0.0.1:1/v1"}},
            "this node runs no prefill or decode workers for pool workers to be beside",
        ),
        ({"collections": [{"name": "docs", "path": "/", "shards": 2}]}, "3 is not a multiple of the 2 shards"),
        (
            {"pool": {"placement": "with-prefill+own", "workers": 0}},
            'pool.workers = 0 with pool.placement = "with-prefill+own", which needs at least 1 besides: use '
            '"with-prefill"',
        ),
        ({"prefill": {"devices": ["cuda:9"]}}, "prefill.devices: 'cuda:9' is not a GPU of this machine"),
    ],
)
def test_an_impossible_coupled_placement_is_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lay_out(near(tmp_path, "coupled", **more), machine())
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("placement", "beside", "stages"),
    [
        ("with-prefill+own", {"pool-0": "prefill-0"}, ["prefill", "decode", "decode"]),
        ("with-decode+own", {"pool-0": "decode-0", "pool-1": "decode-1"}, ["decode", "decode", "prefill", "prefill"]),
    ],
)
def test_the_stage_without_pool_workers_beside_it_has_independent_ones(
    tmp_path: Path, placement: str, beside: dict[str, str], stages: list[str]
) -> None:
    pool = {"placement": placement, "workers": 2, "devices": ["cuda:6", "cuda:7"]}
    docs = {"name": "docs", "path": str(tmp_path), "shards": len(beside)}
    plan = lay_out(near(tmp_path, placement, pool=pool, collections=[docs]), machine())
    placed = {worker.name: worker for worker in plan.workers}
    assert [one.stage for one in pools(plan)] == stages
    assert {one.name: one.paired_with for one in pools(plan) if one.paired_with} == beside
    assert all(placed[one].gpu == placed[name].gpu for one, name in beside.items())
    independent = pools(plan)[len(beside) :]
    assert [(one.gpu_index, one.exclusive_gpu) for one in independent] == [("6", True), ("7", True)]
    cores = [core for one in pools(plan) for core in one.cores]
    assert len(cores) == len(set(cores)) > 0


def test_pool_workers_are_beside_vllms_instances_of_a_stage(tmp_path: Path) -> None:
    model = {
        "engine": "vllm", "name": "m", "python": sys.executable,
        "prefill": {"instances": 2, "tensor_parallel_size": 2}, "decode": {"instances": 2},
    }  # fmt: skip
    pool = {"placement": "with-prefill+own", "workers": 2, "devices": ["cuda:6", "cuda:7"]}
    docs = {"name": "docs", "path": str(tmp_path), "shards": 2}
    plan = lay_out(parse_config({"model": model, "pool": pool, "collections": [docs]}), machine())
    assert [(one.paired_with, one.stage, one.gpu_index) for one in pools(plan)] == [
        ("engine-prefill-0", "prefill", "0"), ("engine-prefill-1", "prefill", "2"),
        ("", "decode", "6"), ("", "decode", "7"),
    ]  # fmt: skip
    assert {one.name for one in plan.of_role("engine")} >= {"engine-prefill-0", "engine-prefill-1"}


def test_without_collections_there_is_no_coupled_pool(tmp_path: Path) -> None:
    assert not pools(lay_out(near(tmp_path, "coupled", collections=[]), machine()))


@pytest.mark.parametrize("count", [0, 9])
def test_more_gpus_than_a_node_has_cannot_be_simulated(count: int) -> None:
    with pytest.raises(ConfigError, match="cannot simulate"):
        Machine.with_simulated_gpus(count)


# ---- embedding on GPUs


def embedding(tmp_path: Path, devices: list[str], **more: Any) -> NodeConfig:
    """A pool worker on cuda:0, and a node that embeds on `devices`."""
    docs = [{"name": "docs", "path": str(tmp_path)}]
    return parse_config(
        {"pool": {"devices": ["cuda:0"]}, "collections": docs, "embedding": {"devices": devices}} | more
    )


def seen(plan: NodePlan) -> dict[str, tuple[str, str, str | None]]:
    """Device, device of the embedder, and visible GPU of each worker."""
    return {worker.name: (worker.device, worker.embedder, worker.visible_devices) for worker in plan.workers}


def test_a_frontend_that_embeds_on_a_gpu_sees_only_this_one(tmp_path: Path) -> None:
    found = seen(lay_out(embedding(tmp_path, ["cuda:3"]), machine()))
    assert found == {"pool-0": ("cuda:0", "cpu", gpu(0).uuid), "frontend-0": ("cpu", "cuda:0", gpu(3).uuid)}
    assert seen(lay_out(embedding(tmp_path, ["cpu"]), machine()))["frontend-0"] == ("cpu", "cpu", "")
    simulated = lay_out(embedding(tmp_path, ["cuda:0"]), Machine.with_simulated_gpus(1))
    assert seen(simulated)["frontend-0"] == ("cpu", "cpu", "")


def test_a_pool_on_a_gpu_on_which_texts_are_embedded_is_not_alone_there(tmp_path: Path) -> None:
    for device, alone in (("cuda:0", False), ("cuda:1", True)):
        plan = lay_out(embedding(tmp_path, [device]), machine())
        assert plan.of_role("pool")[0].exclusive_gpu is alone
        lines = ["pool-0 shares GPU 0 with frontend-0", "frontend-0 shares GPU 0 with pool-0"]
        assert list(shared_gpus(plan)) == ([] if alone else lines)


def test_model_workers_on_gpus_embed_on_their_own_and_others_take_turns(tmp_path: Path) -> None:
    model = {"model": {"name": "m"}}
    on_gpus = {"prefill": {"devices": ["cuda:1"], "spares": 1}, "decode": {"devices": ["cuda:2"]}}
    plan = lay_out(embedding(tmp_path, ["cuda:4"], **model, **on_gpus), machine())
    assert seen(plan)["prefill-0"] == ("cuda:0", "cuda:0", gpu(1).uuid)
    assert seen(plan)["decode-0"] == ("cuda:0", "cuda:0", gpu(2).uuid)
    assert seen(plan)["frontend-0"] == ("cpu", "cuda:0", gpu(4).uuid)
    assert [spare.embedder for spare in plan.spares] == ["cuda:0"]
    plan = lay_out(embedding(tmp_path, ["cuda:4", "cuda:5"], **model), machine())
    visible = {name: found[2] for name, found in seen(plan).items()}
    assert visible == {
        "pool-0": gpu(0).uuid, "prefill-0": gpu(4).uuid, "decode-0": gpu(5).uuid, "frontend-0": gpu(4).uuid,
    }  # fmt: skip
    on_cpu = [worker for worker in plan.workers if worker.role != "pool"]
    assert [(worker.shown_device, worker.cores) for worker in on_cpu] == [("cpu", ())] * 3


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], 'embedding.devices: give "cpu" alone, or one GPU or several'),
        (["cpu", "cuda:1"], 'embedding.devices: give "cpu" alone, or one GPU or several'),
        (["cuda:1", "cuda:2"], "embedding.devices has 2 entries, but only frontend-0 would use one"),
        (["cuda:9"], "embedding.devices: 'cuda:9' is not a GPU of this machine"),
    ],
)
def test_devices_that_cannot_embed_are_refused(tmp_path: Path, devices: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        lay_out(embedding(tmp_path, devices), machine())


def test_a_device_without_a_known_machine_is_checked_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedding\.devices: 'gpu' is not a device"):
        lay_out(embedding(tmp_path, ["gpu"]))
    assert lay_out(embedding(tmp_path, ["cuda:1"])).of_role("frontend")[0].embedder == "cuda:1"


def test_a_gpu_in_mig_mode_embeds_by_instance(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedding\.devices: GPU 6 is partitioned"):
        lay_out(embedding(tmp_path, ["cuda:6"]), CUT)
    frontend = seen(lay_out(embedding(tmp_path, ["MIG-11111111"]), CUT))["frontend-0"]
    assert frontend == ("cpu", "cuda:0", "MIG-11111111")
