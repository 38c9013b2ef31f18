"""A plan gives every worker a device, cores and an endpoint; impossible plans are refused."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.checks import preflight
from runtime.checks.memory_estimate import Need, estimate
from runtime.errors import CollectionError, ConfigError, ModelError, ResourceBusy
from runtime.node.config import KvSection, parse_config
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import NodePlan, plan_spares
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import INDEX
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding import loading
from runtime.retrieval.embedding.loading import choose_embedder
from runtime.serving.http.search_parts import computing_threads
from tests.node.test_layout import placement_text
from tests.retrieval.tiny_model import write_tiny_model

CORES = sorted(os.sched_getaffinity(0))
MODEL = {"model": {"name": "smollm2-135m-instruct"}}


def plan(folder: Path, **sections: Any) -> NodePlan:
    """A node with the collection `docs`, which here is an empty directory."""
    (folder / "docs").mkdir(exist_ok=True)
    return lay_out(parse_config({"collections": [{"name": "docs", "path": str(folder / "docs")}]} | sections))


def refusal(folder: Path, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(folder, **sections)
    return caught.value.message


OPENAI = {"engine": "openai", "name": "big", "url": "http://127.0.0.1:8000/v1"}
SHORT = {"model": MODEL["model"] | {"context_tokens": 1000}}
GONE = {"name": "x", "path": "/nowhere"}
MIXED = {"workers": 2, "devices": ["cuda:0", "cpu"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": OPENAI | {"url": "127.0.0.1:8000"}}, "model.url = '127.0.0.1:8000': give the base URL including /v1"),
    ({"model": OPENAI | {"url": "http://me:secret@host/v1"}}, "model.url contains a user or password"),
    ({"model": OPENAI | {"url": ["http://a/v1", "http://a/v1/"]}}, "model.url lists a server twice"),
    (
        {"model": OPENAI | {"api_key_file": "/nowhere"}},
        "model.api_key_file: the servers' key cannot be read from /nowhere: No such file",
    ),
    (
        {"model": OPENAI | {"api_key_file": os.devnull}},
        "model.api_key_file: the servers' key cannot be read from /dev/null: it is a device",
    ),
    (
        {"model": OPENAI, "probes": {"trigger": "unsure"}},
        'probes.trigger = "unsure": only the node\'s own engine supports it',
    ),
    (
        {"model": OPENAI, "handover": {"mode": "pool"}},
        'handover.mode = "pool": only the node\'s own engine supports it',
    ),
    (
        MODEL | {"handover": {"mode": "pool"}, "kv": {"host_mib": 0}},
        'handover.mode = "pool" needs a tier to write to: set kv.host_mib or kv.disk_mib',
    ),
    ({"probes": {"trigger": "margin"}}, "probes.trigger = 'margin': no such trigger; there are every, drift, unsure"),
    ({"collections": []}, "nothing to serve"),
    (MODEL | {"pool": {"workers": 0}}, "pool.workers = 0: this node needs at least 1"),
    (MODEL | {"prefill": {"workers": 0}}, "prefill.workers = 0: this node needs at least 1"),
    (MODEL | {"decode": {"workers": 0}}, "decode.workers = 0: this node needs at least 1"),
    (
        {"model": OPENAI, "collections": [], "http": {"workers": 2}},
        "http.workers = 2: more than one answers searches, and this node has no collections",
    ),
    (
        {"http": {"workers": 2}, "node": {"run_dir": f"/tmp/{'d' * 100}"}},
        f"node.run_dir: the socket /tmp/{'d' * 100}/http-0.sock.old has 121 bytes, Linux allows 107",
    ),
    (
        {"pool": {"workers": 3, "devices": ["cpu", "cpu"]}},
        "pool.devices has 2 entries for pool.workers = 3: give one entry, or one per worker",
    ),
    ({"pool": {"cores": [[0], [0]]}}, "pool.cores has 2 entries for pool.workers = 1"),
    ({"pool": {"devices": ["gpu:x"]}}, "pool.devices: 'gpu:x' is not a device"),
    ({"pool": {"devices": []}}, "pool.devices is empty"),
    ({"pool": {"cores": [[CORES[0], 4096]]}}, f"pool.cores: pool-0 needs cores [4096]; this process may use {CORES}"),
    (
        {"pool": {"workers": 2, "cores": [[CORES[0]]]}},
        f"pool.cores: core {CORES[0]} is assigned to both pool-0 and pool-1",
    ),
    ({"collections": [GONE]}, "collections: 'x': no such directory: /nowhere"),
    ({"collections": [GONE | {"required": False}] * 2}, "collections: the name 'x' is used twice"),
    (
        {"stores": {"path": "s"}, "collections": [GONE | {"name": "vs_x", "required": False}]},
        "collections: the name 'vs_x' begins with 'vs_', as the ids of the vector stores",
    ),
    (
        MODEL | {"prefill": {"devices": ["cuda:0"]}},
        "prefill.devices and decode.devices: decode-0 is on the CPU and prefill-0 on 'cuda:0'",
    ),
    (
        MODEL | {"prefill": MIXED, "decode": {"devices": ["cuda:1"]}},
        "prefill.devices and decode.devices: prefill-1 is on the CPU and decode-0 on 'cuda:1'",
    ),
    (
        SHORT | {"prefill": {"kv_blocks": 31}},
        "prefill.kv_blocks = 31: a sequence of model.context_tokens = 1000 needs 32 blocks",
    ),
    (
        SHORT | {"decode": {"kv_blocks": 31}},
        "decode.kv_blocks = 31: a sequence of model.context_tokens = 1000 needs 32 blocks",
    ),
]


@pytest.mark.parametrize(("sections", "says"), REFUSED)
def test_an_impossible_plan_is_refused_with_the_key_and_the_limit(
    tmp_path: Path, sections: dict[str, Any], says: str
) -> None:
    assert refusal(tmp_path, **sections).startswith(says)


def test_plans_that_are_almost_refused_are_made(tmp_path: Path) -> None:
    plan(tmp_path, model=OPENAI, probes={"trigger": "drift"})
    plan(tmp_path, **MODEL, prefill={"cores": [[CORES[0]]]}, decode={"cores": [[CORES[0]]]})
    plan(tmp_path, prefill={"devices": ["cuda:0"]})  # it is irrelevant without a model
    plan(tmp_path, **SHORT, prefill={"kv_blocks": 32}, decode={"kv_blocks": 32})


def test_http_workers_are_planned_beside_the_frontend_and_share_the_cores_with_it(tmp_path: Path) -> None:
    planned = plan(tmp_path, http={"workers": 3})
    assert [worker.name for worker in planned.workers] == ["pool-0", "frontend-0", "http-0", "http-1"]
    many = plan(tmp_path, http={"workers": len(CORES) + 1})
    assert (computing_threads(many), computing_threads(plan(tmp_path))) == (1, min(len(CORES), 8))


def test_one_entry_is_shared_and_one_entry_per_worker_is_distributed(tmp_path: Path) -> None:
    shared = plan(tmp_path, **MODEL, decode={"workers": 2, "cores": [CORES]})
    assert {(worker.cores, worker.threads) for worker in shared.of_role("decode")} == {(tuple(CORES), len(CORES))}
    dealt = plan(tmp_path, **MODEL, decode={"workers": 2, "cores": [[CORES[0]], [CORES[-1]]]})
    assert [worker.cores for worker in dealt.of_role("decode")] == [(CORES[0],), (CORES[-1],)]
    assert {worker.threads for worker in dealt.workers} == {1}


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "GPU-0a1b2c3d-0011-2233-4455-66778899aabb"])
def test_every_role_accepts_a_gpu(tmp_path: Path, device: str) -> None:
    on = {"devices": [device]}
    found = plan(tmp_path, **MODEL, pool=on, prefill=on, decode=on)
    assert [worker.device for worker in found.workers] == [device, device, device, "cpu"]


def on_gpus(folder: Path, free_gib: float, **decode: Any) -> tuple[NodePlan, Machine]:
    """The packaged model on two GPUs with so much free memory, as their processes see them."""
    gpus = tuple(Gpu(str(n), f"GPU-{n}", "H100", "", 80 << 30, int(free_gib * 2**30)) for n in range(2))
    sections = {"prefill": {"devices": ["cuda:0"]}, "decode": {"devices": ["cuda:0"], **decode}}
    found = plan(folder, **MODEL, collections=[], **sections)
    workers = tuple(
        replace(worker, gpu=gpus[worker.role == "decode"].uuid, gpu_index=str(int(worker.role == "decode")))
        if worker.device != "cpu"
        else worker
        for worker in found.workers
    )
    return replace(found, workers=workers), Machine(gpus, tuple(CORES), 1 << 34)


@pytest.fixture
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide everything a model on a GPU needs except memory."""
    monkeypatch.setattr(preflight, "check_device", lambda device: None)
    monkeypatch.setattr(preflight, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(preflight, "model_directory", lambda name, progress: None)
    monkeypatch.setattr(preflight, "check_files", lambda name, directory: None)


@pytest.mark.usefixtures("torch_with_cuda")
def test_weights_and_kv_must_fit_in_the_gpus_free_memory(tmp_path: Path) -> None:
    found, machine = on_gpus(tmp_path, free_gib=2.0)
    needs = estimate(found)
    assert needs["decode-0"].gpu - needs["prefill-0"].gpu == 4 * 2048 * 30 * 2 * 3 * 64 * 2, (
        "four slots more, of bfloat16"
    )
    preflight.check(found, machine=machine)
    found, machine = on_gpus(tmp_path, free_gib=0.6)
    message = r"GPU 1 \(GPU-1\) has 0\.6 GiB free, but the node needs decode-0 0\.7: lower"
    with pytest.raises(ResourceBusy, match=message):
        preflight.check(found, machine=machine)
    together = replace(found, workers=tuple(replace(w, gpu="GPU-0") if w.gpu else w for w in found.workers))
    with pytest.raises(ResourceBusy, match=r"the node needs prefill-0 0\.5, decode-0 0\.7: lower"):
        preflight.check_memory(together, machine)


def test_what_embeds_for_stores_counts_in_every_process_that_searches_before_the_first_store_is_made(
    tmp_path: Path,
) -> None:
    without, found = (
        estimate(plan(tmp_path, **MODEL, collections=[], stores={"path": path}))
        for path in ("", str(tmp_path / "stores"))
    )
    (more,) = {found[name].host - without[name].host for name in ("prefill-0", "decode-0", "frontend-0")}
    assert more > 100 << 20


@pytest.mark.usefixtures("torch_with_cuda")
def test_the_host_kv_tier_of_a_gpu_model_counts_as_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = on_gpus(tmp_path, free_gib=2.0)
    found = replace(found, config=replace(found.config, kv=KvSection(host_mib=130 << 10)))
    assert estimate(found)["decode-0"].gpu < 2 << 30
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    with pytest.raises(
        ResourceBusy, match=r"the node needs 13\d\.\d GiB of memory \(.*host tier 130\.0.*\), but 1\.0 GiB are free"
    ):
        preflight.check(found, machine=machine)


@pytest.mark.usefixtures("torch_with_cuda")
def test_standby_workers_need_as_much_memory_as_their_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = on_gpus(tmp_path, free_gib=2.0)
    spares = plan_spares(replace(found.config, decode=replace(found.config.decode, spares=2)), found.workers)
    found = replace(found, spares=spares)
    needs = estimate(found)
    assert needs["decode-spare-0"] == needs["decode-spare-1"] == needs["decode-0"]
    with pytest.raises(
        ResourceBusy, match=r"but the node needs decode-0 0\.7, decode-spare-0 0\.7, decode-spare-1 0\.7: lower"
    ):
        preflight.check(found, machine=machine)
    assert "decode-spare-1" in placement_text(found, machine, needs)


def test_a_torch_without_cuda_is_refused_before_anything_starts(
    tmp_path: Path, torch_with_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, machine = on_gpus(tmp_path, free_gib=2.0)
    monkeypatch.setattr(preflight, "torch_cuda", lambda: None)
    with pytest.raises(ConfigError, match="prefill-0 cannot run on 'cuda:0': the installed torch has no"):
        preflight.check(found, machine=machine)


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    device = "GPU-00000000-0000-0000-0000-000000000000"
    with pytest.raises(ConfigError, match=f"pool.devices: pool-0 cannot run on '{device}': "):
        preflight.check(plan(tmp_path, pool={"devices": [device]}))


def test_a_truncated_index_is_refused_before_anything_starts(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    bulk_load.build(vectors, tmp_path / "docs", metric="l2", degree=4)
    preflight.check(plan(tmp_path))
    codes = tmp_path / "docs" / "segments/0/index" / "codes.npy"
    codes.write_bytes(codes.read_bytes()[:-1])
    with pytest.raises(CollectionError, match=r"codes.npy has .* bytes, not"):
        preflight.check(plan(tmp_path))


def test_a_pool_worker_that_is_added_on_the_host_needs_no_memory_for_the_index_that_it_maps(tmp_path: Path) -> None:
    bulk_load.build(np.eye(64, dtype=np.float32), tmp_path / "docs", degree=2)
    found = lay_out(parse_config({"collections": [{"name": "docs", "path": str(tmp_path / "docs")}]}))
    need, (pool,) = estimate(found)["pool-0"], found.of_role("pool")
    with CollectionReader(tmp_path / "docs") as collection:
        assert need.mapped == collection.state.file_bytes(INDEX) > 0
    assert need.free(pool) == need.host
    shown = placement_text(found, Machine.read(), {"pool-0": Need(1 << 30, mapped=2 << 30)})
    assert "3,072 MiB" in shown, "a dry run shows all that it takes"


def test_an_optional_collection_may_be_missing_or_corrupt(tmp_path: Path) -> None:
    bulk_load.build(np.eye(8, dtype=np.float32), tmp_path / "docs", degree=2)
    (tmp_path / "docs" / "segments/0/index" / "codes.npy").write_bytes(b"cut")
    for name in ("docs", "nowhere"):
        sections: dict[str, Any] = {"name": name, "path": str(tmp_path / name)}
        with pytest.raises((CollectionError, ConfigError), match=name):
            preflight.check(lay_out(parse_config({"collections": [sections]})))
        found = lay_out(parse_config({"collections": [{**sections, "required": False}]}))
        preflight.check(found)
        assert estimate(found)["pool-0"].mapped == 0


# ---- embedding on a GPU


def embedding_on_gpu(folder: Path, free_gib: float, kind: str = "bert") -> tuple[NodePlan, Machine]:
    """A node that searches on the CPU and embeds on a GPU, with a model whose weights are 2 GiB of a sparse file."""
    model = write_tiny_model(folder / "model")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    settings = {"model_type": kind, "hidden_act": "gelu", "layer_norm_eps": 1e-12, **sizes}
    (model / "config.json").write_text(json.dumps(settings))
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(2 << 30)
    spec, _ = choose_embedder(str(model))
    bulk_load.build(np.eye(6, dtype=np.float32), folder / "docs", degree=2, embedder=spec)
    docs = [{"name": "docs", "path": str(folder / "docs")}]
    gpu = Gpu("0", "GPU-00000000", "H100", "", 80 << 30, int(free_gib * 2**30))
    machine = Machine((gpu,), tuple(CORES), 1 << 34)
    return lay_out(parse_config({"collections": docs, "embedding": {"devices": ["cuda:0"]}}), machine), machine


@pytest.fixture
def torch_for_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_device", lambda device: None)
    monkeypatch.setattr(loading, "check_packages", lambda whose: None)


@pytest.mark.usefixtures("torch_for_embedding")
def test_an_embedder_must_fit_in_the_memory_of_its_gpu(tmp_path: Path) -> None:
    found, machine = embedding_on_gpu(tmp_path, free_gib=1.1)
    preflight.check(found, machine=machine)
    needs = estimate(found)
    size = needs["frontend-0"].gpu
    assert 1 << 30 < size < int(1.1 * 2**30), "half of the file, in 16 bits, and a pass"
    said = f"frontend-0 embeds on GPU 0, in {size / 2**20:,.0f} MiB of its memory"
    assert said in placement_text(found, machine, needs)
    on_gpu = {"devices": ["cuda:0"]}
    sections = {**MODEL, "embedding": on_gpu, "prefill": on_gpu, "decode": on_gpu}
    docs = [{"name": "docs", "path": str(tmp_path / "docs")}]
    both = lay_out(parse_config({"collections": docs, **sections}), machine)
    models = replace(both, workers=tuple(replace(worker, embedder="cpu") for worker in both.workers))
    for name in ("prefill-0", "decode-0"):
        assert estimate(both)[name].gpu - estimate(models)[name].gpu == size, "beside weights and KV"
    full = dataclasses.replace(machine.gpus[0], free_bytes=int(0.9 * 2**30))
    with pytest.raises(ResourceBusy, match=r"GPU 0 \(.*\) has 0.9 GiB free, but the node needs frontend-0 1.0"):
        preflight.check(found, machine=dataclasses.replace(machine, gpus=(full,)))


@pytest.mark.usefixtures("torch_for_embedding")
def test_an_embedder_without_a_form_for_gpus_is_refused_before_anything_starts(tmp_path: Path) -> None:
    found, machine = embedding_on_gpu(tmp_path, free_gib=70, kind="mpnet")
    message = r"collection docs: the embedder model cannot run on a GPU: .* has model_type = 'mpnet'; supported are"
    with pytest.raises(ModelError, match=message):
        preflight.check(found, machine=machine)


def test_a_gpu_for_embedding_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    found, machine = embedding_on_gpu(tmp_path, free_gib=70)
    with pytest.raises(ConfigError, match=r"embedding\.devices: frontend-0 cannot embed on 'cuda:0': "):
        preflight.check(found, machine=machine)
