"""The plan of a node: every worker with its name, device, cores and endpoint, derived from the configuration."""

import itertools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from runtime.errors import ConfigError
from runtime.node.api_keys import read_api_keys, read_engine_key
from runtime.node.config import CollectionSection, NodeConfig, Role
from runtime.node.engine_config import BLOCK_TOKENS, OpenAiSection, ServedSection, Stage, VllmSection
from runtime.node.placement.pool_placement import pool_partners, worker_devices
from runtime.node.placement.vllm import check_vllm
from runtime.node.retrieval_config import TRIGGERS, installed_triggers
from runtime.node.stores_config import STORE_PREFIX
from runtime.node.worker_config import KvWorkerSection, WorkerSection

CPU = "cpu"
ANSWERS = "@answers"
"""Internal name of the collection of stored answers; a configuration cannot contain it."""
ANSWERS_FOLDER = ".trinity-answers"
KV_FOLDER = "kv"
_MAX_SOCKET_BYTES = 107  # sun_path without its NUL
_DRAINING_SUFFIX = ".sock.old"  # longest suffix of a socket's name


class WorkerPlan(msgspec.Struct, frozen=True):
    """Placement of one process. `cores` empty: the kernel places it.

    `gpu` is the UUID of the only GPU that the process sees ("" without one), `gpu_index` its index on the machine,
    `device` its name inside the process, or "cpu" if it only embeds there: `embedder` is the device that it embeds on.
    An engine may have several GPUs: these fields then describe the first one, and
    `gpu_numbers` has the indexes of all. `stage`: the stage that an engine serves, or that a pool worker serves first;
    "": both. `numa_node` None: unknown or irrelevant.
    `spare`: number of a standby worker, which is placed like worker `index` of its role; None for others.
    `paired_with`: the worker that a pool worker is placed beside, and that queries it first. `exclusive_gpu`: whether a
    pool worker is the node's only worker on its GPU or MIG instance.
    """

    role: Role
    index: int
    device: str
    cores: tuple[int, ...]
    threads: int
    gpu: str = ""
    gpu_index: str = ""
    numa_node: int | None = None
    spin: bool = True
    spare: int | None = None
    gpu_numbers: tuple[str, ...] = ()
    stage: Stage = ""
    paired_with: str = ""
    exclusive_gpu: bool = False
    embedder: str = CPU

    @property
    def name(self) -> str:
        role = f"{self.role}-{self.stage}" if self.role == "engine" and self.stage else self.role
        return f"{role}-{self.index}" if self.spare is None else f"{role}-spare-{self.spare}"

    @property
    def shown_device(self) -> str:
        """Name of its device on the machine: "cpu", "cuda:3" or "cuda:3,4"."""
        on_gpu = self.gpu and not self.only_embeds_on_gpu
        return f"cuda:{','.join(self.gpu_numbers) or self.gpu_index}" if on_gpu else self.device

    @property
    def only_embeds_on_gpu(self) -> bool:
        """Whether it is on the CPU, and the GPU that it sees is for embedding."""
        return self.device == CPU and self.embedder != CPU

    def is_on(self, gpu: str) -> bool:
        """Whether it uses the GPU with that name or UUID, or a MIG instance of it."""
        cards = [number.partition(":")[0] for number in self.gpu_numbers or (self.gpu_index,)]
        return bool(self.gpu) and gpu in (self.gpu, self.shown_device, *(f"cuda:{card}" for card in cards))

    def shares_gpu_with(self, other: "WorkerPlan") -> bool:
        """Whether another worker is on its GPU or MIG instance."""
        names = (self.gpu, f"cuda:{self.gpu_index}")
        return bool(self.gpu) and self.name != other.name and any(other.is_on(name) for name in names)

    @property
    def visible_devices(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of its process; None leaves it unset.

        A worker sees only its own GPU, decode too, although it opens memory on prefill's GPUs: CUDA IPC opens memory on
        hidden devices (see `ipc.memory.cuda`), and visible ones could get a context from some library.
        """
        if self.gpu_numbers:  # by index, in PCI order: some of vLLM's checks do not support UUIDs
            return ",".join(self.gpu_numbers)
        return "" if self.device == CPU and self.embedder == CPU else self.gpu or None


RING_SLOTS = 256  # 10 ms of the fastest pool measured; a client waits in its own queue beyond
MAX_K = 128  # a result ring's slot has room for so many; OpenAI's limit is 50


class NodePlan(msgspec.Struct, frozen=True):
    """A complete plan. `token` makes the endpoints of this run unique and hard to guess; `spares` are the standby
    workers. `ring_slots`: requests that a pool's client may have outstanding; `max_k`: maximum of a search's k;
    `block_tokens`: of a KV block. They are constants, which tests and measurements replace."""

    config: NodeConfig
    run_dir: str
    token: str
    workers: tuple[WorkerPlan, ...]
    spares: tuple[WorkerPlan, ...] = ()
    ring_slots: int = RING_SLOTS
    max_k: int = MAX_K
    block_tokens: int = BLOCK_TOKENS

    @property
    def processes(self) -> tuple[WorkerPlan, ...]:
        """Workers and standby workers."""
        return (*self.workers, *self.spares)

    def endpoint(self, name: str) -> str:
        """Return the abstract socket of a worker, of "frontend" or of "control"; it leaves no file behind."""
        return f"ipc://@trinity-{self.token}-{name}"

    def http_socket(self, worker: str) -> str:
        """Return the path of the HTTP socket of an engine, or of a process that serves HTTP, in the private run
        directory."""
        return f"{self.run_dir}/{worker}.sock"

    def engine_metrics(self, worker: str) -> Path:
        """Return the file in which an engine's metrics are stored for the supervisor, in Prometheus's text format."""
        return Path(self.run_dir) / f"{worker}.prom"

    @property
    def kv_directory(self) -> Path:
        """Directory of the host KV tier, and of KV files that engines hand over."""
        return Path(self.run_dir) / KV_FOLDER

    @property
    def answers(self) -> Path:
        """Directory of the collection of stored answers, which ends with the node."""
        return Path(self.run_dir) / ANSWERS_FOLDER

    @property
    def collections(self) -> tuple[CollectionSection, ...]:
        """The collections that the pools serve: the configured ones, then those of stores and of stored answers."""
        if not self.config.stores_answers:
            return self.config.searchable
        return (*self.config.searchable, CollectionSection(ANSWERS, str(self.answers), required=False))

    def of_role(self, role: Role) -> tuple[WorkerPlan, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)

    def local_pools(self, worker: str) -> tuple[int, ...]:
        """Return the indexes of the pool workers beside a worker."""
        return tuple(pool.index for pool in self.of_role("pool") if pool.paired_with == worker)


def plan_workers(config: NodeConfig) -> NodePlan:
    """Plan every worker with the configured devices; the pool's placement is resolved already. Raises `ConfigError`."""
    _check_collections(config)
    read_api_keys(config)
    _check_engine(config)
    workers = [
        *_place_pool(config),
        *(_place("prefill", config.prefill) if config.own_model else ()),
        *(_place("decode", config.decode) if config.own_model else ()),
        *(_place_engine(config.model) if isinstance(config.model, VllmSection) else ()),
        WorkerPlan(role="frontend", index=0, device="cpu", cores=(), threads=1),
        *(WorkerPlan("http", index, "cpu", (), 1) for index in range(config.http.workers - 1)),
    ]
    workers = _embedding(config, workers)
    _check_counts(config)
    _check_memory_kinds(workers)
    _check_cores(workers)
    _check_limits(config)
    run_dir = config.node.run_dir or str(default_run_dir(config.node.name))
    _check_sockets(run_dir, workers)
    return NodePlan(config, run_dir, secrets.token_hex(8), tuple(workers), plan_spares(config, workers))


def plan_spares(config: NodeConfig, workers: Sequence[WorkerPlan]) -> tuple[WorkerPlan, ...]:
    """Plan the standby workers: the first of a role is placed like its first worker, and so on, cyclically."""
    spares: list[WorkerPlan] = []
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        places = itertools.cycle([worker for worker in workers if worker.role == role])
        spares += [msgspec.structs.replace(like, spare=n) for n, like in zip(range(section.spares), places)]  # noqa: B905
    return tuple(spares)


def nodes_dir() -> Path:
    """Return the directory of this user's run directories: private, and emptied by a reboot."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "trinity" if base else Path(f"/tmp/trinity-{os.getuid()}")


def default_run_dir(name: str) -> Path:
    """Return the default run directory of a node."""
    return nodes_dir() / name


def _place(role: Role, section: WorkerSection) -> list[WorkerPlan]:
    plans = []
    for index, (device, cores) in enumerate(worker_devices(role, section)):
        threads = max(1, len(cores)) if isinstance(section, KvWorkerSection) else 1
        plans.append(WorkerPlan(role=role, index=index, device=device, cores=cores, threads=threads))
    return plans


def _place_pool(config: NodeConfig) -> list[WorkerPlan]:
    """Plan the pool workers. One that shares its cores with a model does not spin."""
    if not config.needs_pool:
        return []
    return [
        msgspec.structs.replace(worker, paired_with=name, stage=stage, spin=not name or worker.device != CPU)
        for worker, (name, stage) in zip(_place("pool", config.pool), pool_partners(config), strict=True)
    ]


def _place_engine(section: VllmSection) -> list[WorkerPlan]:
    device = CPU if section.on_cpu else "cuda:0"
    stages = [name for name, stage in section.stages.items() for _ in range(stage.instances)]
    return [WorkerPlan("engine", index, device, (), 1, stage=stage) for index, stage in enumerate(stages)]


def embeds_elsewhere(worker: WorkerPlan) -> bool:
    """Whether a worker embeds texts, if on a GPU then on one of `embedding.devices`: it has no GPU of its own."""
    return worker.role in ("frontend", "http", "prefill", "decode") and worker.device == CPU


def _embedding(config: NodeConfig, workers: list[WorkerPlan]) -> list[WorkerPlan]:
    """Give every worker that embeds its device for that: its own GPU, or the next of `embedding.devices`."""
    devices = config.embedding.devices
    if not devices or (CPU in devices and len(devices) > 1):
        raise ConfigError('embedding.devices: give "cpu" alone, or one GPU or several')
    if devices == (CPU,):
        return workers
    using = [worker.name for worker in workers if embeds_elsewhere(worker)]
    if len(devices) > len(using):
        raise ConfigError(
            f"embedding.devices has {len(devices)} entries, but only {', '.join(using)} would use one; other workers "
            "embed on their own GPU"
        )
    turn = itertools.cycle(devices)
    placed = []
    for worker in workers:
        if embeds_elsewhere(worker):
            worker = msgspec.structs.replace(worker, embedder=next(turn))
        elif worker.role in ("prefill", "decode"):
            worker = msgspec.structs.replace(worker, embedder=worker.device)
        placed.append(worker)
    return placed


def _check_sockets(run_dir: str, workers: Sequence[WorkerPlan]) -> None:
    for worker in workers:
        path = f"{run_dir}/{worker.name}{_DRAINING_SUFFIX}"
        if worker.role in ("engine", "http") and (size := len(os.fsencode(path))) > _MAX_SOCKET_BYTES:
            raise ConfigError(
                f"node.run_dir: the socket {path} has {size} bytes, Linux allows {_MAX_SOCKET_BYTES}: give a "
                "shorter node.run_dir"
            )


def _check_memory_kinds(workers: list[WorkerPlan]) -> None:
    """Check that prefill and decode are both on CPUs or both on GPUs, so that KV goes through one kind of memory."""
    held = {worker.device == "cpu": worker for worker in workers if worker.role in ("prefill", "decode")}
    if len(held) > 1:
        raise ConfigError(
            f"prefill.devices and decode.devices: {held[True].name} is on the CPU and {held[False].name} on "
            f"{held[False].device!r}; KV is handed over between CPUs or between GPUs: place all "
            "of them on one kind of device"
        )


def _check_counts(config: NodeConfig) -> None:
    if config.model is None and not config.searchable:
        raise ConfigError("nothing to serve: configure [model], [[collections]] or [stores]")
    if config.model is None and config.answer_cache.threshold:
        raise ConfigError(
            f"answer_cache.threshold = {config.answer_cache.threshold}: answers are those of a model, and this node "
            "has none: configure [model], or remove it"
        )
    if config.http.workers > 1 and not config.searchable:
        raise ConfigError(
            f"http.workers = {config.http.workers}: more than one answers searches, and this node has no collections"
        )
    needed = [("prefill", config.prefill.workers), ("decode", config.decode.workers)] if config.own_model else []
    if config.needs_pool:
        needed.append(("pool", config.pool.workers))
    for role, workers in needed:
        if workers == 0:
            raise ConfigError(f"{role}.workers = 0: this node needs at least 1")


def _check_cores(workers: list[WorkerPlan]) -> None:
    allowed = os.sched_getaffinity(0)
    for worker in workers:
        missing = sorted(set(worker.cores) - allowed)
        if missing:
            raise ConfigError(
                f"{worker.role}.cores: {worker.name} needs cores {missing}; this process may use {sorted(allowed)}"
            )
    owner: dict[int, str] = {}
    for worker in workers:
        if worker.role != "pool" or not worker.spin:
            continue
        for core in sorted(set(worker.cores)):
            if core in owner:
                raise ConfigError(
                    f"pool.cores: core {core} is assigned to both {owner[core]} and {worker.name}; pool workers "
                    "spin and need cores of their own"
                )
            owner[core] = worker.name


def _check_limits(config: NodeConfig) -> None:
    trigger = config.probes.trigger
    if trigger == "unsure" and isinstance(config.model, ServedSection):
        raise ConfigError(
            'probes.trigger = "unsure": only the node\'s own engine supports it; with '
            f'{config.model.__struct_config__.tag!r} use "every" or "drift"'
        )
    if trigger not in TRIGGERS and trigger not in (installed := installed_triggers()):
        known = ", ".join((*TRIGGERS, *sorted(installed)))
        raise ConfigError(f"probes.trigger = {trigger!r}: no such trigger; there are {known}")
    if config.handover.mode == "pool" and isinstance(config.model, ServedSection):
        raise ConfigError('handover.mode = "pool": only the node\'s own engine supports it; others move KV themselves')
    if config.handover.mode == "pool" and not (config.kv.host_mib or config.kv.disk_mib):
        raise ConfigError('handover.mode = "pool" needs a tier to write to: set kv.host_mib or kv.disk_mib')
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        if config.own_model is not None and section.blocks(config.own_model) < config.own_model.row_blocks():
            raise ConfigError(
                f"{role}.kv_blocks = {section.kv_blocks}: a sequence of model.context_tokens = "
                f"{config.own_model.context_tokens} needs {config.own_model.row_blocks()} blocks"
            )


def _check_collections(config: NodeConfig) -> None:
    seen: set[str] = set()
    for collection in config.collections:
        if collection.name in seen:
            raise ConfigError(f"collections: the name {collection.name!r} is used twice")
        seen.add(collection.name)
        if config.stores.path and collection.name.startswith(STORE_PREFIX):
            raise ConfigError(
                f"collections: the name {collection.name!r} begins with {STORE_PREFIX!r}, as the ids of the vector "
                "stores do that clients make: rename it, or leave out [stores]"
            )
        if collection.required and not Path(collection.path).is_dir():
            raise ConfigError(f"collections: {collection.name!r}: no such directory: {collection.path}")
        if config.pool.workers % collection.shards:
            raise ConfigError(
                f"pool.workers = {config.pool.workers} is not a multiple of the {collection.shards} shards of "
                f"collection {collection.name!r}: every shard needs the same number of workers"
            )


def _check_engine(config: NodeConfig) -> None:
    if isinstance(config.model, VllmSection):
        check_vllm(config.model)
    if not isinstance(config.model, OpenAiSection):
        return
    prefill = config.model.prefill
    given = {"model.url": config.model.urls, "model.prefill.url": prefill.urls if prefill else ()}
    for key, url in [(key, url) for key, urls in given.items() for url in urls]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{key} = {url!r}: give the base URL including /v1, such as http://127.0.0.1:8000/v1")
        if parts.username or parts.password:
            raise ConfigError(f"{key} contains a user or password: use model.api_key_file")
    listed = [url for urls in given.values() for url in urls]
    if len(set(listed)) < len(listed):
        raise ConfigError(f"{' and '.join(given)} share a server" if prefill else "model.url lists a server twice")
    if prefill is not None and isinstance(ports := prefill.bootstrap_port, tuple) and len(ports) != len(prefill.urls):
        raise ConfigError(
            f"model.prefill.bootstrap_port has {len(ports)} entries and model.prefill.url {len(prefill.urls)}: give "
            "one port for each server, or a single one for all"
        )
    read_engine_key(config.model)
