"""Diagnosis of a machine and a configuration before a node starts: `trinity doctor`.

Every finding names what was checked, the result, and what to do if it is not "ok".
"""

import importlib.metadata
import itertools
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu import DeviceError
from ipc.native.compiled import can_cache
from runtime.checks import gpu_sharing, permissions, preflight, vllm
from runtime.checks.finding import Finding, Level
from runtime.engines.openai.capabilities import check_servers
from runtime.errors import ConfigError, EmbedderUnreachable, ResourceBusy, TrinityError
from runtime.node.config import HttpSection, NodeConfig
from runtime.node.engine_config import OpenAiSection, VllmSection
from runtime.node.placement.gpus import Gpu, Gpus
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.supervisor.listen import listen
from runtime.node.worker_config import KvWorkerSection
from runtime.packages import torch_cuda
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.embedder import ServerSpec
from runtime.retrieval.embedding.loading import embedder_location, load_embedder

_NOFILE = 4096
_MORE_FILES = f"ulimit -n {_NOFILE}, or LimitNOFILE= in the unit: every client session holds file descriptors"
_MEMLOCK = 1 << 30  # order of magnitude of a node's pinned host buffers
_MORE_LOCKED = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit: the driver may refuse to pin memory"
_PACKAGES = ("numpy", "numba", "pyzmq", "msgspec", "torch", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-ml-py")
_NEEDED = _PACKAGES[:4]
_PLACEMENT = "model, index and placement"
_PROBE_S = 60.0
_TORCH = "import torch; one = torch.eye(8, device='cuda:0'); assert torch.equal((one @ one).cpu(), one.cpu())"


Probe = Callable[[Gpu, Gpu], str]
GpuProbe = Callable[[Gpu], str]


def diagnose(
    config: NodeConfig | None = None,
    gpus: Gpus | None = None,
    probe: Probe | None = None,
    torch_probe: GpuProbe | None = None,
    kernel_probe: GpuProbe | None = None,
    copy_probe: GpuProbe | None = None,
) -> Iterator[Finding]:
    """Yield all findings, cheap checks first. `probe` tests CUDA IPC from one GPU to another, `torch_probe` tests torch
    on a GPU, `kernel_probe` compiles the search's kernels for it, `copy_probe` that of the KV hand-over; all return ""
    on success, else the error."""
    gpus = gpus or Gpus()
    machine = Machine.read(gpus)
    yield from _versions()
    yield from _limits()
    yield _compiled_code()
    needs_gpus = config is not None and any(
        device != "cpu" for role in (config.pool, config.prefill, config.decode) for device in role.devices
    )
    needs_gpus = needs_gpus or (config is not None and isinstance(config.model, VllmSection) and any(config.model.gpus))
    embeds = config is not None and config.embedding.devices != ("cpu",)
    yield from _driver(gpus, machine, needs_gpus or embeds)
    models = config is not None and any(device != "cpu" for role in _model_roles(config) for device in role.devices)
    yield from _pairs(gpus, machine, probe or cuda_ipc, models)
    if config is not None:
        yield from _kernels(config, machine, kernel_probe or kernels_compile, copy_probe or copy_compiles)
        if models or embeds:
            yield from _torch(config, machine, torch_probe or torch_works)
        if isinstance(config.model, OpenAiSection):
            yield from _engine(config.model)
        if isinstance(config.model, VllmSection):
            yield from vllm.findings(config.model)
        yield from _embedders(config)
        yield from permissions.findings(config)
        yield _port(config.http)
        yield from _placement(config, machine)
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
        return Finding("ok", "compiled code", "is cached")
    return Finding(
        "warning",
        "compiled code",
        "cannot be cached: every process compiles it at every start, for about 20 s and 650 MiB",
        "set NUMBA_CACHE_DIR to a directory that this user owns (CacheDirectory= in the unit), or make $HOME writable",
    )


def _limits() -> Iterator[Finding]:
    for kind, minimum, subject, unit, advice in (
        (resource.RLIMIT_NOFILE, _NOFILE, "open files", "", _MORE_FILES),
        (resource.RLIMIT_MEMLOCK, _MEMLOCK, "locked memory", " bytes", _MORE_LOCKED),
    ):
        soft, hard = resource.getrlimit(kind)
        enough = soft == resource.RLIM_INFINITY or soft >= minimum
        yield Finding.of(enough, subject, f"{_limit(soft)}{unit} (hard limit {_limit(hard)})", advice)


def _driver(gpus: Gpus, machine: Machine, wanted: bool) -> Iterator[Finding]:
    if gpus.missing:
        advice = "install NVIDIA's driver and pip install 'trinity-runtime[cuda]'"
        yield Finding(
            "error" if wanted else "warning", "driver", gpus.missing,
            advice if wanted else f"not needed for a node on CPUs; otherwise {advice}",
        )  # fmt: skip
        return
    yield Finding("ok", "driver", f"{gpus.driver()}, {len(machine.gpus)} devices")
    for gpu in machine.gpus:
        yield Finding.of(
            gpu.free_bytes / gpu.memory_bytes > 0.9,
            f"GPU {gpu.index}",
            f"{gpu.name}, {gpu.uuid}, {gpu.free_bytes >> 20} of {gpu.memory_bytes >> 20} MiB free",
            "other processes use it: see nvidia-smi",
        )


def _model_roles(config: NodeConfig) -> tuple[KvWorkerSection, ...]:
    return (config.prefill, config.decode) if config.own_model is not None else ()


def _torch(config: NodeConfig, machine: Machine, probe: GpuProbe) -> Iterator[Finding]:
    """Check that torch can compute on the GPUs of the model and of embedding."""
    advice = "install a build of torch for this driver's CUDA: https://pytorch.org/get-started/locally"
    try:
        built = torch_cuda()
    except TrinityError as error:
        yield Finding("error", "torch CUDA", error.message, advice)
        return
    if built is None:
        yield Finding("error", "torch CUDA", "the installed torch has no CUDA", advice)
        return
    yield Finding("ok", "torch CUDA", f"built for {built}")
    named = {device for role in _model_roles(config) for device in role.devices} | {*config.embedding.devices}
    for gpu in machine.gpus:
        if any(gpu.matches(name) for name in named):
            failure = probe(gpu)
            yield Finding.of(not failure, f"GPU {gpu.index} torch", failure or "works", advice, "error")


def _kernels(config: NodeConfig, machine: Machine, search: GpuProbe, copy: GpuProbe) -> Iterator[Finding]:
    """Check that kernels compile, once for each architecture: the search's for the pool's GPUs, the KV hand-over's for
    decode's, which copy the blocks."""
    decode = config.decode.devices if config.own_model is not None else ()
    for subject, devices, probe, otherwise in (
        ("kernels", config.pool.devices, search, 'search on the CPU (pool.devices = ["cpu"])'),
        ("KV copy", decode, copy, "run the model on CPUs (`devices` of [prefill] and [decode])"),
    ):
        used = [gpu for gpu in machine.gpus if any(gpu.matches(name) for name in devices)]
        for arch, gpu in {gpu.arch: gpu for gpu in used}.items():
            failure, advice = probe(gpu), f"install a tested version of NVRTC, or {otherwise}"
            yield Finding.of(not failure, f"{subject} for {arch}", failure or "compiled, and cached", advice, "error")


def _pairs(gpus: Gpus, machine: Machine, probe: Probe, models: bool) -> Iterator[Finding]:
    whole = [gpu for gpu in machine.gpus if not gpu.is_mig]
    if any(gpu.is_mig for gpu in machine.gpus):
        advice = "run models on whole GPUs or CPUs (nvidia-smi -mig 0): KV cannot be handed over between instances"
        yield Finding("warning", "CUDA IPC", "not available between MIG instances", advice)
        return
    for one, other in itertools.combinations(whole, 2):
        subject = f"GPU {one.index} ↔ {other.index}"
        direct = gpus.peers(one.index, other.index)
        advice = "copies go through host memory: check PCIe ACS and the IOMMU (nvidia-smi topo -p2p r)"
        yield Finding.of(direct, f"{subject} peers", "direct" if direct else "none", advice)
    for one, other in itertools.permutations(whole, 2) if len(whole) > 1 else [(gpu, gpu) for gpu in whole]:
        error = probe(one, other)
        advice = (
            "KV cannot be handed over between these GPUs, and query vectors go through host memory; containers must "
            "share one PID namespace (--pid=host)"
        )
        otherwise: Level = "error" if models else "warning"
        subject = f"GPU {one.index} → {other.index} CUDA IPC"
        yield Finding.of(not error, subject, error or "works", advice, otherwise)


def _engine(section: OpenAiSection) -> Iterator[Finding]:
    """Check that the model's servers can be reached and support what the node needs."""
    for url, answer in check_servers(section):
        subject = f"engine {url}"
        if isinstance(answer, ConfigError):
            yield Finding("error", subject, answer.message, "fix [model], or the server")
        elif isinstance(answer, TrinityError):
            yield Finding("error", subject, answer.message, "start it; a running node uses it as soon as it answers")
        else:
            yield Finding("ok", subject, f"{section.name}, {section.described[url]}; {answer}")
            for missing in answer.limitations():
                yield Finding("warning", subject, missing, "not needed by every client; see docs/engines.md")


def _embedders(config: NodeConfig) -> Iterator[Finding]:
    """Check that the embedding servers answer, with vectors of the right dimension."""
    for collection in config.collections:
        try:
            with CollectionReader(Path(collection.path)) as opened:
                embedder = opened.embedder
        except TrinityError:
            continue  # reported by `preflight`
        if not isinstance(embedder, ServerSpec):
            continue
        subject, location = f"embedder of {collection.name}", embedder_location(collection)
        try:
            load_embedder(embedder, location=location).embed(["a first text"])
        except EmbedderUnreachable as error:
            yield Finding("warning", subject, error.message, "start it; until it answers, only query vectors work")
        except TrinityError as error:
            yield Finding(
                "error", subject, error.message, "fix the server, or `embedder` and its key of the collection"
            )
        else:
            yield Finding("ok", subject, f"{embedder.name} at {location.override or embedder.url}")


def _placement(config: NodeConfig, machine: Machine) -> Iterator[Finding]:
    plan = None
    try:
        plan = lay_out(config, machine)
        preflight.check(plan, machine=machine)
    except TrinityError as error:
        yield Finding("error", _PLACEMENT, error.message, "fix the configuration or the named files")
    else:
        pairs = "".join(f"; {pool.name} beside {pool.paired_with}" for pool in plan.of_role("pool") if pool.paired_with)
        yield Finding("ok", _PLACEMENT, f"complete, and they fit{pairs}")
    if plan is not None:
        yield from gpu_sharing.findings(plan)


def _port(http: HttpSection) -> Finding:
    """Check that HTTP can listen. A port in use is a warning: the node itself may run."""
    try:
        listen(http).close()
    except ResourceBusy as error:
        return Finding("warning", "port", error.message, "nothing to do if it is this node that runs")
    except ConfigError as error:
        return Finding("error", "port", error.message, "fix [http]")
    return Finding("ok", "port", f"{http.host}:{http.port} is free" if http.port else "any free one")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def cuda_ipc(one: Gpu, other: Gpu) -> str:
    """Test whether a process on `other` can read memory that a process on `one` shares; each sees only its own GPU."""
    module = ("-m", "runtime.checks.cuda_ipc_probe")
    command, pipe = [sys.executable, *module, "export"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=_seeing(one)) as exporter:
        assert exporter.stdout is not None
        try:
            if reference := exporter.stdout.readline():
                return _run(other, *module, "open", given=reference)
            return _last_line(exporter.communicate()[1])
        finally:
            exporter.kill()


def torch_works(gpu: Gpu) -> str:
    """Test a matrix product with torch in a process that sees only this GPU."""
    return _run(gpu, "-c", _TORCH)


def _run(gpu: Gpu, *arguments: str, given: bytes = b"") -> str:
    """Run Python where only this GPU is seen; return the last line of its errors, "" if it succeeds."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, timeout=_PROBE_S, env=_seeing(gpu), check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_S:.0f} s"
    return "" if done.returncode == 0 else _last_line(done.stderr)


def kernels_compile(gpu: Gpu) -> str:
    """Compile the search's kernels for a GPU, which caches them."""
    from gpu.cuda.compiler import compile_kernels  # loads numba

    return _failure(compile_kernels, gpu)


def copy_compiles(gpu: Gpu) -> str:
    """Compile the kernel that copies KV blocks for a GPU, which caches it."""
    from gpu.cuda.block_copy import compile_block_copy

    return _failure(compile_block_copy, gpu)


def _failure(compile_: Callable[[str], bytes], gpu: Gpu) -> str:
    try:
        compile_(gpu.arch)
    except (DeviceError, OSError) as error:
        return str(error)
    return ""


def _seeing(gpu: Gpu) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid, "PYTHONPATH": root}


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the process ended without output"
