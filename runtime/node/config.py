"""Configuration of a node: typed TOML sections, validated before anything starts.

`config_file.load_config(path)` returns a `NodeConfig` as written; `placement.layout.lay_out` resolves it to a
`NodePlan`, in which every worker has a device, cores and an endpoint. Errors name the key, its value and the nearest
known key. The docstrings of the sections are the text of docs/configuration.md.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from runtime.errors import ConfigError
from runtime.node.config_errors import explain_error
from runtime.node.engine_config import FilePath, ModelSection, OpenAiSection, Seconds, Section, VllmSection
from runtime.node.retrieval_config import ProbesSection, PromptsSection, RerankSection
from runtime.node.stores_config import STORES, StoresSection
from runtime.node.worker_config import DecodeSection, PoolSection, PrefillSection

Role = Literal["pool", "prefill", "decode", "engine", "frontend", "http"]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
Origin = Annotated[str, Meta(pattern=r"^(\*|https?://[A-Za-z0-9.:\[\]-]+)\Z")]
Verify = Literal["start", "background", "never"]


class NodeSection(Section, frozen=True):
    """The node: its name, its run directory and the timeouts of its processes.

    - `name`: the node's name in commands and metrics.
    - `run_dir`: directory of `node.json`, engine sockets, the host KV tier and, by default, logs while the node runs.
      "" selects a private directory named after the node in the user's runtime directory. A node removes
      `kv`, `logs/*.log*`, `*.sock`, `*.prom` and `*.new` there, so a directory that has such files beside others, and
      in which no node was killed, is refused.
    - `drain_s`: time that a stopping node gives to running requests.
    - `start_s`: a worker that is not ready after this time is killed and restarted.

    A worker without a heartbeat for 30 s is killed and restarted, too.
    """

    name: Name = "trinity"
    run_dir: FilePath = ""
    drain_s: Annotated[float, Meta(ge=1, le=86_400)] = 30.0
    start_s: Annotated[float, Meta(ge=1, le=86_400)] = 600.0


class LogSection(Section, frozen=True):
    """Log output of all processes.

    - `format`: format of standard error. Log files always contain one JSON object per line.
    - `level`: lowest level that is logged.
    - `directory`: directory of the log files, one per process. "" selects the run directory, which is removed when the
      node stops in order. The node does not start if it cannot create files there.

    Each process keeps two files of at most 2 MiB.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    directory: FilePath = ""


_CONNECTIONS = 1024  # that a process has room for, however few requests: those of a proxy, too
RESTART_WAIT_S = 60.0  # the node's own workers and servers that restart take less


class HttpSection(Section, frozen=True):
    """The HTTP frontend: address, keys, timeouts, limits, routing.

    - `host`, `port`: address to listen on. Port 0 selects any free port. Without API keys, only loopback addresses are
      allowed, and a request's Host header must be a loopback name or `host`.
    - `workers`: number of processes that accept connections on the port. One, the frontend, owns everything with state;
      the others answer searches, embeddings and reranking themselves and pass it all other requests (docs/http.md).
    - `api_keys_file`: file with one API key per line. A key may be restricted to collections, and bound to an attribute
      value in them (`KEY notes/tenant=acme`). "": requests need no key.
    - `open_paths`: paths that need no key.
    - `model_aliases`: further names that requests may give the model, such as "gpt-4o-mini" for clients that have it
      built in. Answers have its own name, which other engines are sent, too.
    - `cors_origins`: origins whose pages may send requests from a browser; ["*"] allows all.
    - `max_in_flight`: maximum number of accepted requests; further ones are refused with status 503. Each of the
      `workers` has eight times as many open connections at most, and at least 1,024, since clients keep idle ones; one
      client address may have half of them. All connections through a proxy have one address.
    - `request_timeout_s`: deadline of a request, and the time that a drained worker has to finish its requests.
    - `overlap_weight`: routing picks the worker, or model server, with the fewest requests. One that has the whole
      prompt cached (or recently received it, if that is unknown) counts `overlap_weight` requests fewer, one that has a
      prefix of it a share of that. 0: load only.
    - `drain_notice_s`: a stopping node first fails /health and accepts requests for this time, so that load balancers
      notice before the port closes. Only if /health is polled (twice within 30 s). Counts towards `node.drain_s`, for
      half of it at most.

    A request whose prefill or decode worker died is restarted on another one, at most three times. If there is none, it
    waits for one, as new requests do: for 60 s, or, with `engine = "vllm"`, whose models load for long, `node.start_s`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8080
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    api_keys_file: FilePath = ""
    max_in_flight: Annotated[int, Meta(ge=1, le=100_000)] = 256
    request_timeout_s: Seconds = 600.0
    overlap_weight: Annotated[float, Meta(ge=0, le=1_000)] = 1.0
    drain_notice_s: Annotated[float, Meta(ge=0, le=600)] = 5.0
    open_paths: tuple[Literal["/health", "/ready", "/metrics"], ...] = ("/health", "/ready", "/metrics")
    cors_origins: tuple[Origin, ...] = ()
    model_aliases: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=64)] = ()

    @property
    def max_connections(self) -> int:
        """Maximum number of open connections of each process that accepts them."""
        return max(_CONNECTIONS, 8 * self.max_in_flight)

    @property
    def max_connections_per_peer(self) -> int:
        """Maximum number of open connections of a client address: no one of them may have all."""
        return self.max_connections // 2


Disaggregate = Literal["auto", "always", "never"]
HandoverMode = Literal["p2p", "pool"]


class HandoverSection(Section, frozen=True):
    """Hand-over of KV from prefill to decode.

    - `disaggregate`: which prompts prefill workers compute. "auto": those that a decode worker would not finish as
      soon, in steps that keep `slo.tpot_s`. "never": none; prefill workers only retrieve, and decode workers compute
      the prompts.
    - `mode`: "p2p": decode copies KV out of prefill's memory. "pool": prefill writes it to the first tier of `[kv]`,
      which takes longer, and is done: its memory is free, and it may die or be drained while the prompt waits; any
      decode worker can take it. A prompt for which the tier has no room is handed over as with "p2p".

    After a failed hand-over the request is restarted elsewhere. A hand-over fails if decode refuses
    it, dies, or sends nothing for 30 s (it reports every 5 s while the hand-over waits for room).
    """

    disaggregate: Disaggregate = "auto"
    mode: HandoverMode = "p2p"


class KvSection(Section, frozen=True):
    """Tiers of full KV blocks besides the workers' own memory, from which workers, also restarted ones, load prefixes
    instead of computing them.

    - `host_mib`: size limit of the host tier: files in the run directory, which is memory if that is a tmpfs, else the
      page cache. The node removes them when it stops. 0: no host tier.
    - `disk_mib`, `disk_path`: size limit and directory of the disk tier, which is kept. 0: no disk tier.

    The least recently used blocks are evicted first. API keys that may reach different collections share no blocks.
    """

    host_mib: Annotated[int, Meta(ge=0, le=1 << 24)] = 512
    disk_mib: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    disk_path: FilePath = ""

    def __post_init__(self) -> None:
        if bool(self.disk_mib) != bool(self.disk_path):
            raise ValueError(f"disk_mib = {self.disk_mib} and disk_path = {self.disk_path!r} belong together")


class ControlSection(Section, frozen=True):
    """The control loop, which adjusts the pool's reserve r and flush timeout τ_pre (docs/scheduler.md), and the
    planner, which flips workers to the other role.

    - `planner`: "act" flips prefill or decode workers by load, where a role has more than one; "observe" only logs what
      it would do.

    While decode stalls too much, τ_pre, how long a prefill query leaves free slots to decode, is set to half of
    `slo.ttft_s`. When no query waits, r returns to `pool.reserve` and τ_pre to 0.
    """

    planner: Literal["act", "observe", "off"] = "act"


class SloSection(Section, frozen=True):
    """Service-level objectives.

    - `ttft_s`: time to first token.
    - `tpot_s`: mean time per output token after the first.
    - `search_s`: time of a search without generation. One whose text would wait ten times as long is refused.
    - `objective`: share of the requests that must meet them. Failed and refused requests count as violations. Alerts
      watch the rate at which the error budget, 1 - `objective`, is used up.
    """

    ttft_s: Seconds = 1.0
    tpot_s: Seconds = 0.1
    search_s: Seconds = 0.1
    objective: Annotated[float, Meta(ge=0.5, lt=1.0)] = 0.99

    @property
    def prefill_target_s(self) -> float:
        """Target latency L_pre,max of a prefill query: a twentieth of the TTFT."""
        return self.ttft_s / 20

    @property
    def prefill_wait_s(self) -> float:
        """Maximum wait of a prefill query for a slot: half of the TTFT, the other half is for what follows."""
        return self.ttft_s / 2


class AnswerCacheSection(Section, frozen=True):
    """Semantic cache: answers to prompts that resemble earlier ones, returned without running the model.

    - `threshold`: two questions match if the cosine of their embeddings by all-minilm-l6-v2 is at least this, 0.5 or
      more; with 0.97 they differ in a word at most. 0: no answers are stored and looked up.
    - `ttl_s`: lifetime of a stored answer. The latest 1,000 are kept, in a collection of the pools in the node's run
      directory.
    """

    threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    ttl_s: Seconds = 3600.0

    def __post_init__(self) -> None:
        if 0 < self.threshold < 0.5:
            raise ValueError(f"threshold = {self.threshold}: it is 0, or from 0.5 to 1")


class EmbeddingSection(Section, frozen=True):
    """Where texts are embedded: by models, not by feature hashing or servers, which need no GPU.

    - `devices`: "cpu", or GPUs: "cuda:N" or a UUID, for the frontend and for prefill and decode workers on the CPU, one
      each in turn. Prefill and decode workers on a GPU then embed on their own. See docs/gpu.md, "Embedding".
    """

    devices: tuple[str, ...] = ("cpu",)


class CollectionSection(Section, frozen=True):
    """A collection that the pool serves.

    - `name`: its name in requests; with `[stores]` it may not begin with `vs_`.
    - `path`: its directory.
    - `shards`: number of shards that it was built with. Worker i of the pool serves shard i mod `shards`.
    - `required`: whether a collection that is missing or damaged prevents the node's start. Otherwise, and after the
      start, it is unavailable until it can be opened, and the others are served.
    - `verify`: when its checksums are compared: before it is served ("start"), while it is served ("background"), or
      never.
    - `embedder`: directory or URL of the embedder of its queries, if it differs from the one stored in the collection.
    - `embedder_key_file`: file whose first line is the API key of an embedding server.
    """

    name: Name
    path: Annotated[str, Meta(min_length=1, extra={"is_path": bool})]
    shards: Annotated[int, Meta(ge=1, le=8)] = 1
    required: bool = True
    verify: Verify = "background"
    embedder: Annotated[str, Meta(extra={"is_path": lambda at: at and not at.startswith(("http://", "https://"))})] = ""
    embedder_key_file: FilePath = ""


class NodeConfig(Section, frozen=True):
    """Configuration of a whole node, as written in its TOML file. Without `[model]` the node only serves retrieval."""

    node: NodeSection = NodeSection()
    log: LogSection = LogSection()
    http: HttpSection = HttpSection()
    model: ModelSection | OpenAiSection | VllmSection | None = None
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    handover: HandoverSection = HandoverSection()
    kv: KvSection = KvSection()
    pool: PoolSection = PoolSection()
    control: ControlSection = ControlSection()
    slo: SloSection = SloSection()
    embedding: EmbeddingSection = EmbeddingSection()
    rerank: RerankSection = RerankSection()
    prompts: PromptsSection = PromptsSection()
    probes: ProbesSection = ProbesSection()
    answer_cache: AnswerCacheSection = AnswerCacheSection()
    stores: StoresSection = StoresSection()
    collections: tuple[CollectionSection, ...] = ()

    @property
    def searchable(self) -> tuple[CollectionSection, ...]:
        """The collections whose documents the workers read: the configured ones, and the stores' passages, if any."""
        if not self.stores.path:
            return self.collections
        return (*self.collections, CollectionSection(STORES, f"{self.stores.path}/collection", required=False))

    @property
    def stores_answers(self) -> bool:
        """Whether the answer cache is active."""
        return self.answer_cache.threshold > 0

    @property
    def restart_wait_s(self) -> float:
        """How long a request waits for a worker of a role that has none."""
        return self.node.start_s if isinstance(self.model, VllmSection) else RESTART_WAIT_S

    @property
    def needs_pool(self) -> bool:
        """Whether there is a collection for a pool to search."""
        return bool(self.searchable) or self.stores_answers

    @property
    def own_model(self) -> ModelSection | None:
        """The model that the node's own prefill and decode workers run; None without one, or with another engine."""
        return self.model if isinstance(self.model, ModelSection) else None


def parse_config(raw: dict[str, Any]) -> NodeConfig:
    """Convert TOML's types to a `NodeConfig`. Raises `ConfigError` with the key, its value and the allowed values."""
    model = raw.get("model")
    if isinstance(model, dict):
        raw = raw | {"model": {"engine": "trinity"} | model}
    try:
        return msgspec.convert(raw, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(explain_error(str(error), raw, NodeConfig)) from error
