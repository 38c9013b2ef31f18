"""vLLM's command line, log lines, metrics, memory and the doctor's findings."""

import itertools
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prometheus_client.core import Metric

from runtime.checks import preflight
from runtime.checks.diagnosis import diagnose
from runtime.checks.memory_estimate import estimate
from runtime.checks.vllm import host_bytes
from runtime.engines.openai.http import Http
from runtime.engines.vllm.command import (
    check_arguments,
    command,
    environment,
    event_endpoints,
    find_vllm,
)
from runtime.engines.vllm.instance import LogForwarder
from runtime.engines.vllm.process import drain
from runtime.errors import ConfigError, ResourceBusy
from runtime.node.config import NodeConfig
from runtime.node.config_file import load_config
from runtime.node.forking import ONE_THREAD
from runtime.node.metrics.exporter import engine_families
from runtime.node.placement.gpus import Gpu
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from tests.engines.test_vllm import fake_python
from tests.engines.test_vllm_plan import config, section

LAUNCHERS = Path(__file__).parents[2] / "launchers"


def test_instances_publish_kv_events_in_the_run_directory_where_there_is_a_choice_between_them() -> None:
    def published(events: bool = True, **asked_for: Any) -> Any:
        made = section(devices=["cpu"], **asked_for)
        plan = lay_out(NodeConfig(model=made))
        place = plan.of_role("engine")[0]
        pairs = dict(itertools.pairwise(command(made, plan, place, events=events)))
        given = json.loads(pairs.get("--kv-events-config", "{}"))
        at = event_endpoints(plan, place)
        assert not given or (given["endpoint"], given["replay_endpoint"]) == (at.events, at.replay)
        assert at.events.startswith(f"ipc://{plan.run_dir}/")
        return given.get("enable_kv_cache_events", False)

    assert published(instances=2)
    assert not published(instances=1)
    assert not published(instances=2, events=False), "an older vLLM"
    assert not published(instances=2, extra_args=["--kv-events-config", "{}"])
    assert not published(instances=2, extra_args=["--data-parallel-size=2"])


def test_extra_arguments_go_last_and_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ONE_THREAD:
        monkeypatch.setenv(name, "1")
    made = section(devices=["cpu"], extra_args=["--dtype", "float32"], environment={"VLLM_CPU_KVCACHE_SPACE": "2"})
    plan = lay_out(NodeConfig(model=made))
    place = plan.of_role("engine")[0]
    assert list(command(made, plan, place)[-2:]) == ["--dtype", "float32"]
    found = environment(made, plan, place)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert not ONE_THREAD.keys() & found.keys(), "vLLM chooses its own"


@pytest.mark.parametrize(
    ("cores", "instances", "parallel", "bound"),
    [
        (8, 1, 1, [None]),  # vLLM's own choice
        (2, 2, 1, ["0", "1"]),
        (8, 2, 1, ["0,1,2", "3,4,5,6"]),
        (9, 2, 2, ["0,1|2,3", "4,5|6,7"]),
        (1, 3, 1, ["0", "0", "0"]),
        (2, 3, 1, ["0", "0", "1"]),
    ],
)
def test_instances_on_a_cpu_have_separate_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, instances: int, parallel: int, bound: list[str | None]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    made = section(devices=["cpu"], instances=instances, tensor_parallel_size=parallel)
    plan = lay_out(NodeConfig(model=made))
    places = plan.of_role("engine")
    assert [environment(made, plan, place).get("VLLM_CPU_OMP_THREADS_BIND") for place in places] == bound
    asked = section(devices=["cpu"], instances=instances, environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert {environment(asked, plan, place)["VLLM_CPU_OMP_THREADS_BIND"] for place in places} == {"nobind"}


@pytest.mark.parametrize("argument", ["--port=9", "--uds", "--served_model_name", "-tp"])
def test_arguments_derived_from_the_section_are_refused_as_extra_arguments(argument: str) -> None:
    with pytest.raises(ConfigError, match="is set by the node"):
        check_arguments(section(extra_args=["--dtype", "float32", argument]))


def test_an_interpreter_without_vllm_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"vLLM is not installed there: .* -m pip install vllm"):
        find_vllm(section(python=sys.executable))


def test_an_older_version_is_refused_and_a_newer_one_logged(tmp_path: Path) -> None:
    made = section(python=str(fake_python(tmp_path)))
    assert find_vllm(made).version == "0.32.0"
    fake_python(tmp_path, "0.9.2")
    with pytest.raises(ConfigError, match=r"vLLM 0\.9\.2 .* is too old: it needs 0\.20 or later"):
        find_vllm(made)


def test_log_lines_keep_their_level_and_the_last_error_is_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    logs = LogForwarder(logging.getLogger("engine-0"))
    with caplog.at_level(logging.INFO):
        logs.forward("(APIServer pid=12) WARNING 11-22 16:35:38 [vllm.py:725] Model Runner V2 requires Triton\n")
        logs.forward("(EngineCore pid=13) ERROR 11-22 16:35:39 [core.py:9] torch.OutOfMemoryError: CUDA out of memory")
        logs.forward("INFO:     Application startup complete.")
        logs.forward("(EngineCore pid=13) ERROR 11-22 16:35:40 [core.py:9] Exception: WorkerProc initialization failed")
        logs.forward("RuntimeError: Engine core initialization failed. See root cause above.")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "Model Runner V2 requires Triton"),
        ("ERROR", "torch.OutOfMemoryError: CUDA out of memory"),
        ("INFO", "Application startup complete."),
        ("ERROR", "Exception: WorkerProc initialization failed"),
        ("INFO", "RuntimeError: Engine core initialization failed. See root cause above."),
    ]
    assert logs.last_error == "OutOfMemoryError: CUDA out of memory"


def test_metrics_of_all_engines_are_merged_with_a_worker_label(tmp_path: Path) -> None:
    files = {}
    for number in range(2):
        files[f"engine-{number}"] = tmp_path / f"{number}.prom"
        files[f"engine-{number}"].write_text(
            "# HELP vllm:prompt_tokens_total Tokens.\n# TYPE vllm:prompt_tokens_total counter\n"
            f'vllm:prompt_tokens_total{{engine="0"}} {number}\n# TYPE process_open_fds gauge\nprocess_open_fds 3\n'
        )
    files["engine-2"] = tmp_path / "not there"
    files["engine-3"] = tmp_path / "none"
    files["engine-3"].write_text("this is no {metric\n")
    (family,) = engine_families(files)
    assert isinstance(family, Metric)
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("vllm:prompt_tokens_total", {"worker": "engine-0", "engine": "0"}, 0.0),
        ("vllm:prompt_tokens_total", {"worker": "engine-1", "engine": "0"}, 1.0),
    ]


@pytest.mark.parametrize("name", ["node8-vllm.toml", "node8-vllm-split.toml"])
def test_the_examples_for_eight_gpus_have_the_documented_layout(tmp_path: Path, name: str) -> None:
    (tmp_path / "my-docs").mkdir()
    text = (LAUNCHERS / name).read_text().replace('"python3"', f'"{sys.executable}"')
    (tmp_path / "node.toml").write_text(text)
    plan = lay_out(load_config(tmp_path / "node.toml"), Machine.with_simulated_gpus(8))
    assert [place.gpu_numbers for place in plan.of_role("engine")] == [(str(number),) for number in range(6)]


# ---- memory


def test_on_a_cpu_an_instance_needs_memory_for_kv_weights_and_processes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    sizes = {"path": str(tmp_path), "devices": ["cpu"], "prefill": {}, "decode": {"instances": 2}}
    processes = host_bytes(section(devices=["cuda:0"]), "")
    made = section(**sizes, environment={"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert host_bytes(made, "decode") == processes + 1000 + (2 << 30)
    assert host_bytes(section(**sizes, extra_args=["--kv-cache-memory-bytes=500"]), "decode") == processes + 1500
    assert host_bytes(section(**sizes), "prefill") == int(0.92 * psutil.virtual_memory().total)
    needs = estimate(lay_out(NodeConfig(model=made)))
    assert 0 <= needs["engine-decode-2"].host - host_bytes(made, "decode") <= 100 << 20  # the worker beside it, no more
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE .* 'much' is not a number"):
        host_bytes(section(**sizes, environment={"VLLM_CPU_KVCACHE_SPACE": "much"}), "decode")


def test_on_a_gpu_each_stages_instance_needs_its_memory_fraction() -> None:
    gpus = tuple(Gpu(str(n), f"GPU-0000000{n}", "H100", "", 80 << 30, 70 << 30) for n in range(2))
    machine = Machine(gpus, tuple(range(8)), 1 << 40)
    made = config(prefill={"extra_args": ["--gpu-memory-utilization", "0.5"]}, decode={})
    needs = estimate(lay_out(made, machine), machine)
    assert needs["engine-prefill-0"].gpu == 40 << 30
    assert needs["engine-decode-1"].gpu == int(0.92 * (80 << 30))


def test_the_doctor_reports_vllms_memory_and_connector(tmp_path: Path) -> None:
    stages = {"prefill": {}, "decode": {"instances": 2}, "devices": ["cpu"]}
    huge = {"VLLM_CPU_KVCACHE_SPACE": "1000000"}
    made = config(python=str(fake_python(tmp_path)), environment=huge, **stages)
    found = {finding.subject: finding for finding in diagnose(made)}
    assert found["vLLM"].text == "0.32.0, 1 prefill and 2 decode × m, KV by TrinityKvFiles"
    assert found["model, index and placement"].level == "error"
    assert "VLLM_CPU_KVCACHE_SPACE" in found["model, index and placement"].text


def test_a_node_whose_vllm_exceeds_free_memory_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, huge = str(fake_python(tmp_path)), {"VLLM_CPU_KVCACHE_SPACE": "1000000"}
    with pytest.raises(ResourceBusy, match=r"engine-0 \d.*VLLM_CPU_KVCACHE_SPACE = \"1\""):
        preflight.check(lay_out(config(python=python, devices=["cpu"], environment=huge)))
    monkeypatch.setattr(preflight, "check_device", lambda device: None)
    gpus = (Gpu("0", "GPU-00000000", "H100", "", 80 << 30, 70 << 30),)
    machine = Machine(gpus, tuple(range(8)), 1 << 40)
    message = r"70\.0 GiB free, but the node needs engine-0 73\.\d: .*--gpu-memory-utilization"
    with pytest.raises(ResourceBusy, match=message):
        preflight.check(lay_out(config(python=python), machine), machine=machine)


def test_a_draining_instance_ends_after_two_polls_without_requests(tmp_path: Path) -> None:
    found = iter([2, 0, 1, None, 0, 0, 7])
    worker = SimpleNamespace(awaits_release=True)
    monitor = SimpleNamespace(socket=str(tmp_path / "x.sock"), check=lambda: True, read_metrics=lambda: next(found))
    instance = SimpleNamespace(wait=lambda seconds: False)
    (tmp_path / "x.sock").touch()
    drain(worker, instance, monitor)  # type: ignore[arg-type]
    assert next(found) == 7
    assert not (tmp_path / "x.sock").exists()


def test_a_renamed_socket_accepts_no_new_connections(tmp_path: Path) -> None:
    socket = tmp_path / "x.sock"
    socket.touch()
    http = Http(str(socket))
    assert http.accepting
    socket.rename(tmp_path / "x.sock.old")
    assert not http.accepting
    assert Http().accepting
