"""The node's configuration: typed TOML, refused with the key's name and the nearest known one before anything starts.

`config_file.load_config(path)` gives a `NodeConfig` as written; `placement.layout.lay_out` turns it into a `NodePlan`,
where every worker has a device, cores and an endpoint.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from runtime.errors import ConfigError
from runtime.node.config_errors import explain_error
from runtime.node.engine_config import ModelSection, OpenAiSection, Seconds, Section, VllmSection
from runtime.node.remote_config import Name, RemoteSection
from runtime.node.retrieval_config import ProbesSection, PromptsSection

Role = Literal["pool", "prefill", "decode", "engine", "frontend"]
MOST_WORKERS = 8
Workers = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
Threads = Annotated[int, Meta(ge=1, le=256)]
Origin = Annotated[str, Meta(pattern=r"^(\*|https?://[A-Za-z0-9.:\[\]-]+)\Z")]
Verify = Literal["start", "background", "never"]
PoolPolicy = Literal["trinity", "paper", "fifo", "static"]
"""In the order of their numbers in `runtime/pool/tables.py`; from "fifo" on with one queue, by arrival."""


class NodeSection(Section, frozen=True):
    """The node itself. `run_dir` "" means a private directory named after the node in the user's runtime directory.

    A worker that is not ready after `start_s`, or has no heartbeat for `heartbeat_s`, is killed and starts again; a
    node that stops gives its requests `drain_s`. Each is a second at least: no worker starts or beats much faster.
    """

    name: Name = "trinity"
    run_dir: str = ""
    drain_s: Annotated[float, Meta(ge=1, le=86_400)] = 30.0
    start_s: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    heartbeat_s: Annotated[float, Meta(ge=1, le=86_400)] = 30.0


class LogSection(Section, frozen=True):
    """Logs: lines of `level` and above, as `format` to standard error, and as JSON to a file for each process.

    The files are kept to `files` of `max_bytes` a process, in `directory`. "" means the run directory: a node that
    stops in order takes them with it. A node does not start if no file can be made there.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    directory: str = ""
    max_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)] = 2 << 20
    files: Annotated[int, Meta(ge=1, le=100)] = 2


class HttpSection(Section, frozen=True):
    """Where HTTP listens. `api_keys_file` holds one key a line, which may name the collections that it reaches and bind
    it to an attribute of them (`KEY notes/tenant=acme`); "" asks for none. `port` 0 takes any free port.

    A request whose prefill or decode worker dies is started again elsewhere, at most `restarts` times; while there is
    no other worker, it waits for one for `restart_wait_s`, and so does a new one, unless `restarts` is 0. For as long
    at most, a frontend that takes a dead one's place leaves connections waiting until it knows a worker of each role.
    Traces of the last `traces` requests that ended are kept. A request goes to the worker, or the model's server, with
    the fewest requests; one that has been given all of its prompt lately counts `overlap_weight` fewer, one that has
    been given a part of it that part. 0: load alone decides.

    A request's head must be there `header_timeout_s` after its first byte (or the connection's begin); a connection is
    closed when it has been without a request for `idle_timeout_s`, or when its client has read nothing of an answer for
    `send_timeout_s`. `max_connections` are open at most, `max_connections_per_peer` of them from one address: a proxy
    is one peer, so behind one both are the same.

    A node that is told to stop fails /health first, and goes on to take requests for `drain_notice_s`, if somebody
    watches /health (two looks within 30 s), who then knows of it before the port closes. That is part of
    `node.drain_s`, half of it at most. With `vllm_metrics` /metrics has queue, running requests and KV use under vLLM's
    names too.

    With keys, all but `open_paths` need one; without, a request's Host header must be loopback's or `host`. A browser
    lets pages from `cors_origins` ask; ["*"]: all pages.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8080
    api_keys_file: str = ""
    max_in_flight: Annotated[int, Meta(ge=1, le=100_000)] = 256
    request_timeout_s: Seconds = 600.0
    restarts: Annotated[int, Meta(ge=0, le=100)] = 3
    restart_wait_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    traces: Annotated[int, Meta(ge=0, le=100_000)] = 512
    overlap_weight: Annotated[float, Meta(ge=0, le=1_000)] = 1.0
    header_timeout_s: Seconds = 10.0
    idle_timeout_s: Seconds = 75.0
    send_timeout_s: Seconds = 60.0
    max_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    max_connections_per_peer: Annotated[int, Meta(ge=1, le=1_000_000)] = 512
    drain_notice_s: Annotated[float, Meta(ge=0, le=600)] = 5.0
    open_paths: tuple[Literal["/health", "/ready", "/metrics"], ...] = ("/health", "/ready", "/metrics")
    cors_origins: tuple[Origin, ...] = ()
    vllm_metrics: bool = False


class WorkerSection(Section, frozen=True):
    """What every worker role has. `devices` and `cores` have one entry a worker, or one that all share."""

    workers: Workers = 1
    devices: tuple[str, ...] = ("cpu",)
    cores: tuple[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], ...] = ()
    threads: Threads = 1


class KvWorkerSection(WorkerSection, frozen=True):
    """A role that holds KV: `kv_blocks` blocks a worker; 0: as many as `slots` sequences of full context need.

    `spares`: processes that have loaded the model and wait to take the place of a worker that dies. Each needs as much
    memory as a worker.
    """

    slots: Annotated[int, Meta(ge=1, le=512)] = 8
    kv_blocks: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    spares: Annotated[int, Meta(ge=0, le=8)] = 0

    def blocks(self, model: ModelSection) -> int:
        """KV blocks of one worker."""
        return self.kv_blocks or self.slots * model.row_blocks


class PrefillSection(KvWorkerSection, frozen=True):
    """Prefill workers. `slots` prompts are held at once, from their first chunk until decode has pulled their KV.

    A pass through the model takes `chunk_tokens` tokens, of one prompt or of several. "auto" measures at start with how
    many a pass is about as fast as it gets.
    """

    slots: Annotated[int, Meta(ge=1, le=256)] = 4
    chunk_tokens: Literal["auto"] | Annotated[int, Meta(ge=16, le=65_536)] = 256
    passage_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 768

    @property
    def expected_chunk_tokens(self) -> int:
        """For who cannot measure: the configured number, or the default's."""
        return 256 if self.chunk_tokens == "auto" else self.chunk_tokens


class DecodeSection(KvWorkerSection, frozen=True):
    """Decode workers. `slots` rows are generated at once; a probe may add at most `probe_tokens` of passages.

    When blocks run out, the youngest row makes room: later its KV is loaded from where `[kv]` keeps it, and the rest is
    computed again. What a row must compute beside its next token goes through the model in chunks of
    `chunk_tokens`, beside the others' tokens.
    """

    slots: Annotated[int, Meta(ge=1, le=512)] = 8
    chunk_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 256
    probe_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 192
    probe_window_tokens: Annotated[int, Meta(ge=4, le=512)] = 48


Doorbell = Literal["eventfd", "zeromq"]
"""As `ipc` names them; it is not imported here."""


PoolPlacement = Literal["own", "with-prefill", "with-decode", "coupled"]


class PoolSection(WorkerSection, frozen=True):
    """Vector-pool workers: replicas of each other, or of each shard of a collection that is split.

    `placement`: "own" is where `devices` says. Else there is one beside each prefill worker, each decode worker, or
    each of both ("coupled"), on its GPU, or on its cores, and `workers` and `devices` are left out. A worker asks the
    pool beside it first, and another while that is down, slow or crowded; who has none asks all in turn.

    `slots` queries are active at most; "auto": the fewest with which an extend wastes no more than a tenth, measured
    at start (few on a CPU, hundreds on a GPU). The engine has as many again for paused queries. `policy` is what
    decides who is active (docs/scheduler.md); "paper", "fifo" and "static" are there to compare with. `reserve` is r,
    the share of the slots that is prefill's. `prefill_target_s` is L_pre,max, within which a prefill query ought to be
    answered; "auto": a twentieth of `slo.ttft_s`. A decode query is paused `max_pauses` times at most, and all of them
    for `aging_s`. `flush_s`: τ, how long slots are held back while fewer queries wait than are free.
    `flush_prefill_s`: τ_pre, how long a prefill query leaves slots to decode. `extends_per_launch`: on a GPU where no
    blocks stay, the most extends in one launch; it ends early when a query is finished or arrives. `form`: "auto" has
    blocks stay on a GPU that no other worker of the node is on, in a launch that takes queries by itself
    (docs/gpu.md); with "launches" the host launches every extend, as it does elsewhere: for a GPU on which other
    programs compute. `arena_slots`: query vectors that clients on GPUs may have in this GPU's memory, in equal shares.
    `doorbell`: how the pool and its clients wake each other when they sleep, "eventfd" or, about 100 µs slower,
    "zeromq", which needs no descriptors handed from process to process.
    """

    placement: PoolPlacement = "own"
    slots: Literal["auto"] | Annotated[int, Meta(ge=1, le=4096)] = "auto"
    policy: PoolPolicy = "trinity"
    extends_per_launch: Annotated[int, Meta(ge=1, le=1024)] = 1
    form: Literal["auto", "launches"] = "auto"
    arena_slots: Annotated[int, Meta(ge=0, le=65_536)] = 4096
    queue: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    ring_slots: Annotated[int, Meta(ge=2, le=65_536)] = 256
    reserve: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.3
    max_k: Annotated[int, Meta(ge=1, le=1024)] = 128
    max_top_m: Annotated[int, Meta(ge=1, le=4096)] = 512
    top_m: Annotated[int, Meta(ge=1, le=4096)] = 160
    search_width: Annotated[int, Meta(ge=1, le=32)] = 4
    prefill_target_s: Literal["auto"] | Annotated[float, Meta(ge=0.0, le=60.0)] = "auto"
    aging_s: Annotated[float, Meta(gt=0.0, le=60.0)] = 0.05
    flush_prefill_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    flush_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    max_pauses: Annotated[int, Meta(ge=0, le=10_000)] = 64
    doorbell: Doorbell = "eventfd"

    def prefill_target(self, slo: "SloSection") -> float:
        """L_pre,max in seconds."""
        return slo.ttft_s / 20 if self.prefill_target_s == "auto" else self.prefill_target_s


Disaggregate = Literal["auto", "always", "never"]


class HandoverSection(Section, frozen=True):
    """KV from prefill to decode. In order "decode_first" decode keeps room for a prompt before prefill runs it.

    `disaggregate`: which prompts are run by prefill workers. "auto": not those that a decode worker has done as soon,
    in steps that keep `slo.tpot_s`; "never": none, prefill workers only retrieve, and decode workers do both.

    A hand-over has failed if decode refuses it, dies, or is not heard of for `lease_s` (it is every 5 s while it waits
    for room); with `failure_policy` "recompute" the request is started again elsewhere (`http.restarts`), with "fail"
    it ends.

    Between two steps of a running batch decode copies for about `slice_s`, a thirtieth of a step at most. It takes in
    another prompt while what waits for a place in the batch has less than `waiting_share` of its blocks.
    """

    order: Literal["prefill_first", "decode_first"] = "prefill_first"
    disaggregate: Disaggregate = "auto"
    lease_s: Annotated[float, Meta(ge=10, le=86_400)] = 30.0
    failure_policy: Literal["recompute", "fail"] = "recompute"
    slice_s: Annotated[float, Meta(gt=0, le=1)] = 0.002
    waiting_share: Annotated[float, Meta(gt=0, le=1)] = 0.1


class KvSection(Section, frozen=True):
    """Where full KV blocks stay beside the workers' own memory, so that another worker, or one that starts anew, loads
    a prefix instead of computing it.

    The host tier are files of at most `host_mib` MiB in the run directory, which is memory where that is a tmpfs, and
    else the page cache's; the node removes them when it stops. The disk tier, files of at most `disk_mib` MiB in
    `disk_path`, stays. 0: none. The longest unused go first. API keys without the same collections share no blocks.
    """

    host_mib: Annotated[int, Meta(ge=0, le=1 << 24)] = 512
    disk_mib: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    disk_path: str = ""

    def __post_init__(self) -> None:
        if bool(self.disk_mib) != bool(self.disk_path):
            raise ValueError(f"disk_mib = {self.disk_mib} and disk_path = {self.disk_path!r} belong together")


class ControlSection(Section, frozen=True):
    """The control loop (docs/scheduler.md). Every `interval_s` it may move the pool's reserve by at most `step`, within
    `reserve_min` ("auto": .1) and `reserve_max`.

    Targets: prefill's P95 wait for a pool slot ("auto": what a prefill query ought to be answered within,
    `pool.prefill_target_s`); the stalled share of decode rows' time (.8 of what `slo.tpot_s` leaves beside a step, and
    `decode_stall_target` at least); the KV link's use. While decode stalls too much, `pool.flush_prefill_s` is half of
    `slo.ttft_s` (or the target of prefill's wait that is configured). When nobody waits, both go back.
    `planner`: by load, prefill or decode workers are flipped to the other role ("act"), or the log says so ("advise").
    """

    enabled: bool = True
    planner: Literal["off", "advise", "act"] = "off"
    interval_s: Annotated[float, Meta(ge=0.2, le=0.5)] = 0.25
    prefill_wait_target_s: Literal["auto"] | Annotated[float, Meta(gt=0, le=60)] = "auto"
    decode_stall_target: Annotated[float, Meta(gt=0, le=1)] = 0.25
    link_target: Annotated[float, Meta(ge=0, le=1)] = 0.05
    reserve_min: Literal["auto"] | Annotated[float, Meta(ge=0, le=1)] = "auto"
    reserve_max: Annotated[float, Meta(ge=0, le=1)] = 0.9
    step: Annotated[float, Meta(gt=0, le=0.5)] = 0.1
    dwell_s: Annotated[float, Meta(ge=0.2, le=600)] = 1.0
    hysteresis: Annotated[float, Meta(ge=0.01, le=0.9)] = 0.2

    def __post_init__(self) -> None:
        if self.reserve_min != "auto" and self.reserve_min > self.reserve_max:
            raise ValueError(f"reserve_min = {self.reserve_min} is over reserve_max = {self.reserve_max}")

    def wait_target_s(self, pool: PoolSection, slo: "SloSection") -> float:
        """Of prefill's P95 wait, in seconds; a target of the pool's that is less than a millisecond counts as one."""
        if self.prefill_wait_target_s != "auto":
            return self.prefill_wait_target_s
        return max(pool.prefill_target(slo), 1e-3)

    def min_reserve(self, pool: PoolSection) -> float:
        """r is never moved below this."""
        return min(pool.reserve, self.reserve_max, 0.1) if self.reserve_min == "auto" else self.reserve_min


class SloSection(Section, frozen=True):
    """What the node promises: time to the first token, mean time per later token, a search alone; and to what share.

    Counted over the requests that were sent, so a failed or refused one breaks it too. Alerts watch the rate at which
    the rest, 1 - `objective`, is used up.
    """

    ttft_s: Seconds = 1.0
    tpot_s: Seconds = 0.1
    search_s: Seconds = 0.1
    objective: Annotated[float, Meta(ge=0.5, lt=1.0)] = 0.99

    @property
    def prefill_wait_s(self) -> float:
        """How long a prefill query may wait for a slot at most: the other half of TTFT is for all that comes after."""
        return self.ttft_s / 2


class TracingSection(Section, frozen=True):
    """Requests and searches as OpenTelemetry spans, off by default; needs the extra [otel].

    Where they go, how many, and under which name, the standard variables say: OTEL_EXPORTER_OTLP_ENDPOINT (over HTTP),
    OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_BSP_MAX_QUEUE_SIZE and the others.
    """

    enabled: bool = False


class AnswerCacheSection(Section, frozen=True):
    """Answers to prompts like earlier ones, given without running the model; off by default.

    Questions are alike from a cosine of `threshold` on, in the embedding of `embedder`. An answer is kept for `ttl_s`,
    and at most `entries` are: in a live collection of the pools, in the node's run directory.
    """

    enabled: bool = False
    embedder: str = "all-minilm-l6-v2"
    threshold: Annotated[float, Meta(ge=0.5, le=1.0)] = 0.97
    ttl_s: Seconds = 3600.0
    entries: Annotated[int, Meta(ge=1, le=100_000)] = 1000


class CollectionSection(Section, frozen=True):
    """A collection that the pool loads: its name in requests, its directory, and into how many shards it was built.

    Of a split collection each pool worker serves one shard: worker i has shard i mod `shards`. A collection that is
    missing or damaged when the node starts is an error of the start if it is `required`, else unavailable until it can
    be opened; later it is unavailable either way, and the others are served. `verify`: when its checksums are compared,
    before it is served ("start"), while it is ("background"), or never.

    The collection says what embeds its queries; `embedder` is the directory or URL where that is on this machine, if it
    is elsewhere, and `embedder_key_file` holds the key that a server asks for on its first line.

    `demand`: an attribute of its documents (a tenant, say) that the filter of every search must bind by eq or in; a
    search without is refused.
    """

    name: Name
    path: Annotated[str, Meta(min_length=1)]
    shards: Annotated[int, Meta(ge=1, le=8)] = 1
    required: bool = True
    verify: Verify = "background"
    embedder: str = ""
    embedder_key_file: str = ""
    demand: str = ""


class NodeConfig(Section, frozen=True):
    """A whole node, as written in its TOML file. Without `[model]` the node serves retrieval alone."""

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
    prompts: PromptsSection = PromptsSection()
    probes: ProbesSection = ProbesSection()
    tracing: TracingSection = TracingSection()
    answer_cache: AnswerCacheSection = AnswerCacheSection()
    collections: tuple[CollectionSection, ...] = ()
    remote: tuple[RemoteSection, ...] = ()

    @property
    def stores_answers(self) -> bool:
        """Whether there is a cache of answers."""
        return self.answer_cache.enabled and self.model is not None

    @property
    def needs_pool(self) -> bool:
        """Whether there is anything for a pool to search."""
        return bool(self.collections) or self.stores_answers

    @property
    def own_model(self) -> ModelSection | None:
        """The model that the node's own prefill and decode workers run; None if it has none, or another engine does."""
        return self.model if isinstance(self.model, ModelSection) else None


def parse_config(raw: dict[str, Any]) -> NodeConfig:
    """A `NodeConfig` from TOML's own types. Raises `ConfigError` that names the key, its value and what is expected."""
    model = raw.get("model")
    if isinstance(model, dict):
        raw = raw | {"model": {"engine": "trinity"} | model}
    try:
        return msgspec.convert(raw, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(explain_error(str(error), raw, NodeConfig)) from error
