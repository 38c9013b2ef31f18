"""From a configuration to a plan: every worker with its name, device, cores and endpoint; what cannot be is refused."""

import itertools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from runtime.errors import ConfigError
from runtime.node.api_keys import read_api_keys
from runtime.node.config import CollectionSection, NodeConfig, Role, WorkerSection
from runtime.node.engine_config import OpenAiSection, ServedSection, Stage, VllmSection
from runtime.node.placement.pool_placement import check_device, paired_workers, worker_devices
from runtime.node.placement.vllm import check_vllm

CPU = "cpu"
ANSWERS = "@answers"
"""The pools' name of the collection of stored answers: none that a configuration can give."""
ANSWERS_FOLDER = ".trinity-answers"
KV_FOLDER = "kv"
_MOST_SOCKET = 107  # bytes: sun_path without its NUL
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WHILE_DRAINING = ".sock.old"  # the longest name that a socket gets


class WorkerPlan(msgspec.Struct, frozen=True):
    """One process of the node. `cores` empty: the kernel places it.

    `gpu` is the UUID of the only GPU that the process shall see ("" without one), `gpu_index` its number on the
    machine, `device` what the process calls it. An engine may have several: then these are the first one's, and
    `gpu_numbers` those of all; `stage` is what it is for. `numa_node` None: not known, or of no matter. `spare`: the
    number of a standby worker, which is placed like worker `index` of its role; None for every other. `beside`: the
    worker beside which a pool's stands, that asks it first. `alone`: whether a pool's has its GPU, or instance of one,
    to itself, as far as the node knows.
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

    @property
    def name(self) -> str:
        role = f"{self.role}-{self.stage}" if self.stage else self.role
        return f"{role}-{self.index}" if self.spare is None else f"{role}-spare-{self.spare}"

    @property
    def shown_device(self) -> str:
        """Where it is placed, as people name it: "cpu", "cuda:3" or "cuda:3,4"."""
        return f"cuda:{','.join(self.gpu_numbers) or self.gpu_index}" if self.gpu else self.device

    def is_on(self, gpu: str) -> bool:
        """Whether a GPU of that name or UUID is its own, or the one that its MIG instance is cut from."""
        cards = [number.partition(":")[0] for number in self.gpu_numbers or (self.gpu_index,)]
        return bool(self.gpu) and gpu in (self.gpu, self.shown_device, *(f"cuda:{card}" for card in cards))

    @property
    def visible_devices(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of its process; None leaves it as it is.

        Its own GPU alone, for decode too, though that opens memory on prefill's GPUs: CUDA IPC opens what the variable
        hides (see `ipc.memory.cuda`), and seeing more would only let a library put a context on another's GPU.
        """
        if self.gpu_numbers:  # by number, in the order of PCI buses: vLLM takes no UUIDs for some of its checks
            return ",".join(self.gpu_numbers)
        return "" if self.device == "cpu" else self.gpu or None


class NodePlan(msgspec.Struct, frozen=True):
    """A node ready to start: `token` makes its endpoints unguessable and unlike those of every other run.

    `spares` are its standby workers.
    """

    config: NodeConfig
    run_dir: str
    token: str
    workers: tuple[WorkerPlan, ...]
    spares: tuple[WorkerPlan, ...] = ()

    @property
    def processes(self) -> tuple[WorkerPlan, ...]:
        """The workers and the standby workers."""
        return (*self.workers, *self.spares)

    def endpoint(self, what: str) -> str:
        """The abstract socket name of `what` (a worker's name, "frontend" or "control"); it leaves no file behind."""
        return f"ipc://@trinity-{self.token}-{what}"

    def engine_socket(self, worker: str) -> str:
        """The path of the socket at which an engine that the node runs is asked; in the run directory, which is ours
        alone."""
        return f"{self.run_dir}/{worker}.sock"

    def engine_metrics(self, worker: str) -> Path:
        """The file in which an engine's own metrics are left for the supervisor, in Prometheus's text format."""
        return Path(self.run_dir) / f"{worker}.prom"

    @property
    def kv_directory(self) -> Path:
        """Where workers leave KV for each other in files: the host tier, or what an engine hands over so."""
        return Path(self.run_dir) / KV_FOLDER

    @property
    def answers(self) -> Path:
        """The directory of the collection of stored answers, which ends with the node."""
        return Path(self.run_dir) / ANSWERS_FOLDER

    @property
    def collections(self) -> tuple[CollectionSection, ...]:
        """What the pools serve: the node's collections, and behind them that of stored answers, if it has one."""
        if not self.config.stores_answers:
            return self.config.collections
        return (*self.config.collections, CollectionSection(ANSWERS, str(self.answers), required=False))

    def of_role(self, role: Role) -> tuple[WorkerPlan, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)

    def local_pools(self, worker: str) -> tuple[int, ...]:
        """Which of the pool's workers stand beside a worker."""
        return tuple(pool.index for pool in self.of_role("pool") if pool.paired_with == worker)


def plan_workers(config: NodeConfig) -> NodePlan:
    """Every worker by its device's name, of a configuration whose pool has its place. Raises `ConfigError`."""
    _check_collections(config)
    _check_remote(config)
    read_api_keys(config)
    _check_engine(config)
    workers = [
        *_place_pool(config),
        *(_place("prefill", config.prefill) if config.own_model else ()),
        *(_place("decode", config.decode) if config.own_model else ()),
        *(_place_engine(config.model) if isinstance(config.model, VllmSection) else ()),
        WorkerPlan(role="frontend", index=0, device="cpu", cores=(), threads=1),
    ]
    _check_counts(config)
    _check_ways(workers)
    _check_cores(workers)
    _check_limits(config)
    run_dir = config.node.run_dir or str(default_run_dir(config.node.name))
    _check_sockets(run_dir, workers)
    return NodePlan(config, run_dir, secrets.token_hex(8), tuple(workers), plan_spares(config, workers))


def plan_spares(config: NodeConfig, workers: Sequence[WorkerPlan]) -> tuple[WorkerPlan, ...]:
    """The standby workers: the first of a role is placed like its first worker, and so on, round and round."""
    spares: list[WorkerPlan] = []
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        places = itertools.cycle([worker for worker in workers if worker.role == role])
        spares += [msgspec.structs.replace(like, spare=n) for n, like in zip(range(section.spares), places)]  # noqa: B905
    return tuple(spares)


def nodes_dir() -> Path:
    """Where the nodes of this user keep their run directories: private, and emptied by a reboot."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "trinity" if base else Path(f"/tmp/trinity-{os.getuid()}")


def default_run_dir(name: str) -> Path:
    """Where a node of this name keeps `node.json` while it runs."""
    return nodes_dir() / name


def _place(role: Role, section: WorkerSection) -> list[WorkerPlan]:
    plans = []
    for index, (device, cores) in enumerate(worker_devices(role, section)):
        check_device(f"{role}.devices", device)
        plans.append(WorkerPlan(role=role, index=index, device=device, cores=cores, threads=section.threads))
    return plans


def _place_pool(config: NodeConfig) -> list[WorkerPlan]:
    """On cores that it shares with a model it does not spin."""
    if not config.needs_pool:
        return []
    workers = _place("pool", config.pool)
    if not (names := paired_workers(config)):
        return workers
    return [
        msgspec.structs.replace(worker, paired_with=name, spin=worker.device != CPU)
        for worker, name in zip(workers, names, strict=True)
    ]


def _place_engine(section: VllmSection) -> list[WorkerPlan]:
    device = CPU if section.on_cpu else "cuda:0"
    stages = [name for name, stage in section.stages.items() for _ in range(stage.instances)]
    return [WorkerPlan("engine", index, device, (), 1, stage=stage) for index, stage in enumerate(stages)]


def _check_sockets(run_dir: str, workers: Sequence[WorkerPlan]) -> None:
    for worker in workers:
        path = f"{run_dir}/{worker.name}{_WHILE_DRAINING}"
        if worker.role == "engine" and (size := len(os.fsencode(path))) > _MOST_SOCKET:
            raise ConfigError(
                f"node.run_dir: an engine's socket, {path}, has {size} bytes, Linux allows {_MOST_SOCKET}: give a "
                "shorter node.run_dir"
            )


def _check_ways(workers: list[WorkerPlan]) -> None:
    """KV goes through the host's memory or from GPU to GPU, and both ends must go the same way."""
    held = {worker.device == "cpu": worker for worker in workers if worker.role in ("prefill", "decode")}
    if len(held) > 1:
        raise ConfigError(
            f"prefill.devices and decode.devices: {held[True].name} is on the CPU and {held[False].name} on "
            f"{held[False].device!r}; KV is handed over between CPUs or between GPUs: put all of them on one kind"
        )


def _check_counts(config: NodeConfig) -> None:
    if config.model is None and not config.collections and not config.remote:
        raise ConfigError("nothing to serve: give a [model], [[collections]], [[remote]], or several of them")
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
                f"{worker.role}.cores: {worker.name} asks for cores {missing}; this process may use {sorted(allowed)}"
            )
        cores = len(set(worker.cores)) or len(allowed)
        if worker.threads > cores:
            raise ConfigError(f"{worker.role}.threads = {worker.threads}: {worker.name} has {cores} cores")
    owner: dict[int, str] = {}
    for worker in workers:
        if worker.role != "pool" or not worker.spin:
            continue
        for core in sorted(set(worker.cores)):
            if core in owner:
                raise ConfigError(
                    f"pool.cores: core {core} is given to both {owner[core]} and {worker.name}, and a pool spins"
                )
            owner[core] = worker.name


def _check_limits(config: NodeConfig) -> None:
    pool = config.pool
    if config.probes.trigger == "unsure" and isinstance(config.model, ServedSection):
        raise ConfigError(
            'probes.trigger = "unsure": how sure a model is only the node\'s own engine can tell; it is '
            f'{config.model.__struct_config__.tag!r}: "every" and "drift" work with that too'
        )
    if pool.extends_per_launch > 1 and "cpu" in pool.devices:
        raise ConfigError(f"pool.extends_per_launch = {pool.extends_per_launch}: on a CPU it is 1")
    for key, value in (("max_k", pool.max_k), ("top_m", pool.top_m)):
        if value > pool.max_top_m:
            raise ConfigError(f"pool.{key} = {value} is over pool.max_top_m = {pool.max_top_m}")
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        if config.own_model is not None and section.blocks(config.own_model) < config.own_model.row_blocks:
            raise ConfigError(
                f"{role}.kv_blocks = {section.kv_blocks}: a sequence of model.context_tokens = "
                f"{config.own_model.context_tokens} takes {config.own_model.row_blocks} blocks"
            )


def _check_collections(config: NodeConfig) -> None:
    seen: set[str] = set()
    for collection in config.collections:
        if collection.name in seen:
            raise ConfigError(f"collections: the name {collection.name!r} is used twice")
        seen.add(collection.name)
        if collection.required and not Path(collection.path).is_dir():
            raise ConfigError(f"collections: {collection.name!r}: no such directory: {collection.path}")
        if config.pool.workers % collection.shards:
            raise ConfigError(
                f"pool.workers = {config.pool.workers} is no multiple of the {collection.shards} shards of "
                f"collection {collection.name!r}: every shard needs as many workers as the others"
            )


def _check_remote(config: NodeConfig) -> None:
    seen = {collection.name for collection in config.collections}
    for remote in config.remote:
        if remote.name in seen:
            raise ConfigError(f"remote: the name {remote.name!r} is used twice")
        seen.add(remote.name)
        for url in remote.urls:
            try:
                well = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
            except ValueError:
                well = False
            if not well:
                raise ConfigError(f"remote: {remote.name!r}: {url!r} is no node: give it as http://HOST:PORT")
            if config.http.port == urlsplit(url).port and urlsplit(url).hostname in (config.http.host, *_LOOPBACK):
                raise ConfigError(f"remote: {remote.name!r}: {url} is this node, which would ask itself")
            if remote.urls.count(url) > 1:
                raise ConfigError(f"remote: {remote.name!r}: the node {url} is named twice")


def _check_engine(config: NodeConfig) -> None:
    if isinstance(config.model, VllmSection):
        check_vllm(config.model)
    if not isinstance(config.model, OpenAiSection):
        return
    for url in config.model.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"model.url = {url!r}: give the server's address up to its /v1: http://127.0.0.1:8000/v1")
        if parts.username or parts.password:
            raise ConfigError("model.url has a user or a password in it: put the key into model.api_key_file")
    if len(set(config.model.urls)) < len(config.model.urls):
        raise ConfigError("model.url names a server twice")
    read_engine_key(config.model)


def read_engine_key(section: OpenAiSection) -> str:
    """The key that the servers of the model ask for, the first line of its file; "" without one."""
    if not section.api_key_file:
        return ""
    try:
        lines = Path(section.api_key_file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.api_key_file: cannot read {section.api_key_file}: {error}") from error
    key = lines[0].strip()
    if not key or not key.isascii() or not key.isprintable():  # not shown: it may be all but the secret
        raise ConfigError(f"model.api_key_file: {section.api_key_file} has no key of printable ASCII on its first line")
    return key
