"""What stands in the way of a node on this machine, looked for before it starts: `trinity doctor`.

Every finding says what was looked at, how it is, and what to do about it if it is not well.
"""

import importlib.metadata
import itertools
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ipc.memory.compiled import can_cache
from runtime.checks import preflight, remote, vllm
from runtime.checks.finding import Finding, Level
from runtime.engines.openai.capabilities import check_servers
from runtime.errors import ConfigError, EmbedderUnreachable, TrinityError
from runtime.node.config import KvWorkerSection, NodeConfig
from runtime.node.engine_config import OpenAiSection, VllmSection
from runtime.node.placement.gpus import Gpu, Gpus
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.supervisor.listen import listen
from runtime.retrieval.embedding.embedder import ServerSpec
from runtime.retrieval.embedding.loading import embedder_location, load_embedder
from runtime.retrieval.live.collection import collection_info
from runtime.serving.model.packages import torch_cuda

_NOFILE = 4096
_MORE_FILES = f"ulimit -n {_NOFILE}, or LimitNOFILE= in the unit: every client holds descriptors"
_MEMLOCK = 1 << 30  # pinned host buffers of a node are of this order
_MORE_LOCKED = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit: a driver may refuse to pin memory"
_SHM = 1 << 30
_MORE_SHM = "mount -o remount,size=2G /dev/shm (docker: --shm-size=2g); Trinity's own memory is not there"
_PACKAGES = ("numpy", "numba", "pyzmq", "msgspec", "torch", "cuda-bindings", "nvidia-ml-py")
_NEEDED = _PACKAGES[:4]
_PROBE_S = 60.0
_TORCH = "import torch; one = torch.eye(8, device='cuda:0'); assert torch.equal((one @ one).cpu(), one.cpu())"


Probe = Callable[[Gpu, Gpu], str]
TorchProbe = Callable[[Gpu], str]


def diagnose(
    config: NodeConfig | None = None,
    gpus: Gpus | None = None,
    probe: Probe | None = None,
    torch_probe: TorchProbe | None = None,
) -> Iterator[Finding]:
    """All findings, cheap ones first. The probes say "" if something works, else why not: `probe` CUDA IPC from one GPU
    to another, `torch_probe` torch on a GPU.
    """
    gpus = gpus or Gpus()
    machine = Machine.read(gpus)
    yield from _versions()
    yield from _limits()
    yield _compiled_code()
    wants_gpus = config is not None and any(
        device != "cpu" for role in (config.pool, config.prefill, config.decode) for device in role.devices
    )
    wants_gpus = wants_gpus or (config is not None and isinstance(config.model, VllmSection) and any(config.model.gpus))
    yield from _driver(gpus, machine, wants_gpus)
    yield from _numa(machine)
    models = config is not None and any(device != "cpu" for role in _model_roles(config) for device in role.devices)
    yield from _pairs(gpus, machine, probe or cuda_ipc, models)
    if config is not None:
        if models:
            yield from _torch(config, machine, torch_probe or torch_works)
        if isinstance(config.model, OpenAiSection):
            yield from _engine(config.model)
        if isinstance(config.model, VllmSection):
            yield from vllm.findings(config.model, machine)
        yield from _embedders(config)
        if config.remote:
            yield from remote.findings(config)
        yield from _port(config)
        yield _files(config, machine)
        for line in preflight.unverified_collections(config):
            yield Finding("ok", *line.split(": ", 1))


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    for package in _PACKAGES:
        try:
            yield Finding("ok", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            needed = package in _NEEDED
            extra = "" if needed else "[llm]" if package == "torch" else "[cuda]"
            yield Finding(
                "error" if needed else "warning",
                package,
                "not installed",
                f"pip install 'trinity-runtime{extra}'" + ("" if needed else " if this node needs it"),
            )


def _compiled_code() -> Finding:
    if can_cache():
        return Finding("ok", "compiled code", "is kept for the next process")
    return Finding(
        "warning",
        "compiled code",
        "cannot be kept: every process compiles for itself, some 20 s and 650 MiB at each start",
        "set NUMBA_CACHE_DIR to a directory of this user's own (CacheDirectory= in the unit), or let it write its home",
    )


def _limits() -> Iterator[Finding]:
    for kind, least, what, unit, advice in (
        (resource.RLIMIT_NOFILE, _NOFILE, "open files", "", _MORE_FILES),
        (resource.RLIMIT_MEMLOCK, _MEMLOCK, "locked memory", " bytes", _MORE_LOCKED),
    ):
        soft, hard = resource.getrlimit(kind)
        enough = soft == resource.RLIM_INFINITY or soft >= least
        yield Finding.of(enough, what, f"{_limit(soft)}{unit} (hard limit {_limit(hard)})", advice)
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        yield Finding(
            "warning", "/dev/shm", f"not there: {error.strerror}", "mount a tmpfs: torch's workers may want it"
        )
        return
    yield Finding.of(free >= _SHM, "/dev/shm", f"{free >> 20} MiB free", _MORE_SHM)


def _driver(gpus: Gpus, machine: Machine, wanted: bool) -> Iterator[Finding]:
    if gpus.missing:
        advice = "install NVIDIA's driver and pip install 'trinity-runtime[cuda]'"
        yield Finding(
            "error" if wanted else "warning", "driver", gpus.missing,
            advice if wanted else f"nothing to do for a node on CPUs; else {advice}",
        )  # fmt: skip
        return
    yield Finding("ok", "driver", f"{gpus.driver()}, {len(machine.gpus)} devices")
    for gpu in machine.gpus:
        yield Finding.of(
            gpu.free_bytes / gpu.memory_bytes > 0.9,
            f"GPU {gpu.index}",
            f"{gpu.name}, {gpu.uuid}, {gpu.free_bytes >> 20} of {gpu.memory_bytes >> 20} MiB free",
            "something else uses it: nvidia-smi shows what",
        )


def _numa(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.gpus:
        if gpu.is_mig:
            continue
        if gpu.numa_node is None:
            advice = "nothing to do on one NUMA node; else set pool.cores by hand (nvidia-smi topo -m)"
            yield Finding("warning", f"GPU {gpu.index} NUMA", f"unknown for {gpu.pci_bus}", advice)
        elif gpu.numa_node not in machine.node_cores:
            advice = "give this process cores of that node (taskset, CPUAffinity=, cpuset)"
            yield Finding("warning", f"GPU {gpu.index} NUMA", f"node {gpu.numa_node}: no core of it is ours", advice)
        else:
            count = len(machine.node_cores[gpu.numa_node])
            yield Finding("ok", f"GPU {gpu.index} NUMA", f"node {gpu.numa_node}, {count} cores")


def _model_roles(config: NodeConfig) -> tuple[KvWorkerSection, ...]:
    return (config.prefill, config.decode) if config.own_model is not None else ()


def _torch(config: NodeConfig, machine: Machine, probe: TorchProbe) -> Iterator[Finding]:
    """Whether torch can compute where the model shall run."""
    advice = "install a build of torch for this driver's CUDA: https://pytorch.org/get-started/locally"
    try:
        built = torch_cuda()
    except TrinityError as error:
        yield Finding("error", "torch CUDA", error.message, advice)
        return
    if built is None:
        yield Finding("error", "torch CUDA", "the installed torch has none", advice)
        return
    yield Finding("ok", "torch CUDA", f"built for {built}")
    named = {device for role in _model_roles(config) for device in role.devices}
    for gpu in machine.gpus:
        if any(gpu.matches(name) for name in named):
            trouble = probe(gpu)
            yield Finding.of(not trouble, f"GPU {gpu.index} torch", trouble or "works", advice, "error")


def _pairs(gpus: Gpus, machine: Machine, probe: Probe, models: bool) -> Iterator[Finding]:
    whole = [gpu for gpu in machine.gpus if not gpu.is_mig]
    if any(gpu.is_mig for gpu in machine.gpus):
        advice = "run models on whole GPUs or CPUs (nvidia-smi -mig 0): KV cannot be handed over between instances"
        yield Finding("warning", "CUDA IPC", "MIG instances have none", advice)
        return
    for one, other in itertools.combinations(whole, 2):
        what = f"GPU {one.index} ↔ {other.index}"
        near = gpus.peers(one.index, other.index)
        advice = "copies go through host memory: check PCIe ACS and the IOMMU (nvidia-smi topo -p2p r)"
        yield Finding.of(near, f"{what} peers", "direct" if near else "none", advice)
    for one, other in itertools.permutations(whole, 2) if len(whole) > 1 else [(gpu, gpu) for gpu in whole]:
        trouble = probe(one, other)
        advice = (
            "a model on these GPUs cannot hand its KV over, and query vectors go through host memory; containers must "
            "share one PID namespace (--pid=host)"
        )
        otherwise: Level = "error" if models else "warning"
        what = f"GPU {one.index} → {other.index} CUDA IPC"
        yield Finding.of(not trouble, what, trouble or "works", advice, otherwise)


def _engine(section: OpenAiSection) -> Iterator[Finding]:
    """Whether the servers that run the model do what is wanted of them."""
    for url, found in check_servers(section):
        what = f"engine {url}"
        if isinstance(found, ConfigError):
            yield Finding("error", what, found.message, "mend [model], or the server")
        elif isinstance(found, TrinityError):
            yield Finding("error", what, found.message, "start it; a node that runs already takes it when it answers")
        else:
            yield Finding("ok", what, f"{section.name}, {found}")
            for missing in found.limitations():
                yield Finding(
                    "warning", what, missing, "nothing to do if nobody needs it; docs/engines.md has the rest"
                )


def _embedders(config: NodeConfig) -> Iterator[Finding]:
    """Whether the servers that embed the collections' queries answer, with vectors of the right length."""
    for collection in config.collections:
        try:
            embedder = collection_info(Path(collection.path)).embedder
        except TrinityError:
            continue  # told by those who look at collections
        if not isinstance(embedder, ServerSpec):
            continue
        what, location = f"embedder of {collection.name}", embedder_location(collection)
        try:
            load_embedder(embedder, location=location).embed(["a first text"])
        except EmbedderUnreachable as error:
            yield Finding("warning", what, error.message, "start it; until it answers queries must be vectors")
        except TrinityError as error:
            yield Finding("error", what, error.message, "mend the server, or `embedder` and its key of the collection")
        else:
            yield Finding("ok", what, f"{embedder.name} at {location.override or embedder.url}")


def _port(config: NodeConfig) -> Iterator[Finding]:
    where = f"{config.http.host}:{config.http.port}"
    try:
        listen(config.http).close()
    except TrinityError as error:
        yield Finding("error", f"port {where}", error.message, "stop what listens there, or set http.port")
    else:
        yield Finding("ok", f"port {where}", "free")


def _files(config: NodeConfig, machine: Machine) -> Finding:
    try:
        plan = lay_out(config, machine)
        preflight.check(plan, machine=machine)
    except TrinityError as error:
        return Finding(
            "error", "model, index and placement", error.message, "mend the configuration or the files named"
        )
    near = "".join(f"; {pool.name} beside {pool.paired_with}" for pool in plan.of_role("pool") if pool.paired_with)
    return Finding("ok", "model, index and placement", f"all there, and they fit{near}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def cuda_ipc(one: Gpu, other: Gpu) -> str:
    """Have a process on `one` share memory that a process on `other` reads; each sees its own GPU alone."""
    command = [sys.executable, "-m", "runtime.checks.cuda_ipc_probe"]
    with subprocess.Popen(
        [*command, "export"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_seeing(one)
    ) as exporter:
        assert exporter.stdout is not None
        try:
            reference = exporter.stdout.readline()
            if not reference:
                return _last_line(exporter.communicate(timeout=_PROBE_S)[1])
            done = subprocess.run(
                [*command, "open"],
                input=reference,
                capture_output=True,
                timeout=_PROBE_S,
                env=_seeing(other),
                check=False,
            )
            return "" if done.returncode == 0 else _last_line(done.stderr)
        except subprocess.TimeoutExpired:
            return f"no answer within {_PROBE_S:.0f} s"
        finally:
            exporter.kill()


def torch_works(gpu: Gpu) -> str:
    """Have a process that sees this GPU alone multiply on it with torch."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, timeout=_PROBE_S, env=_seeing(gpu), check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_S:.0f} s"
    return "" if done.returncode == 0 else _last_line(done.stderr)


def _seeing(gpu: Gpu) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid, "PYTHONPATH": root}


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the process ended without a word"
