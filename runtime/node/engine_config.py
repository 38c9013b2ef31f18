"""`[model]`: the node's own engine, OpenAI-compatible servers, or vLLM."""

import itertools
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# ---- base of all sections


Seconds = Annotated[float, Meta(gt=0, le=86_400)]
FilePath = Annotated[str, Meta(extra={"is_path": bool})]
"""A path, which `config_file` makes absolute unless it is empty."""
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of the TOML file. Every subclass is frozen too."""


BLOCK_TOKENS = 32
"""Tokens per KV block: prefixes are shared in whole blocks, and attention reads long blocks faster."""


class ModelSection(Section, frozen=True, tag_field="engine", tag="trinity"):
    """`engine = "trinity"`, the default: the node's own prefill and decode workers run the model.

    - `name`: a packaged model, or a directory with a model in transformers' format.
    - `context_tokens`: context length.
    - `weights`: type in which the large matrices are stored and multiplied. KV has this type on GPUs, and float32 on a
      CPU.
      - "bfloat16" needs half the memory of float32 and, on a processor that multiplies it, about 0.6 of the time. Where
        two tokens are almost equally likely, it may choose another one than float32 does, and another one if a request
        is computed in other chunks, as after the death of a worker.
      - "int8", for CPUs, uses bfloat16 for prompts and, for steps of up to 16 rows, int8 with one scale per output.
        Decode keeps both copies, and a step takes 0.67 to 0.9 of bfloat16's time.
      - "float16", for GPUs and models that were trained in it, has three bits of precision more than bfloat16 and a
        smaller range.
      - "auto" is bfloat16 on GPUs. On a CPU it is int8 with AMX, bfloat16 with AVX-512 BF16 or ARM's BF16, else
        float32.
    """

    name: Annotated[str, Meta(extra={"is_path": lambda name: "/" in name or name.startswith((".", "~"))})]
    context_tokens: Annotated[int, Meta(ge=64, le=1_048_576)] = 2048
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"

    def row_blocks(self, block_tokens: int = BLOCK_TOKENS) -> int:
        """Return the KV blocks of a sequence of full context."""
        return -(-self.context_tokens // block_tokens)


Stage = Literal["", "prefill", "decode"]
"""Stage that an instance of an engine serves; "": whole requests."""


class ServedSection(Section, frozen=True):
    """Keys of the engines whose model is served over OpenAI's protocol:

    - `name`: the model's name on the server.

    The limit of prompt and answer together is the one that the server reports, if it does.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]


EventEndpoint = Annotated[str, Meta(pattern=r"^(tcp://[^\s/]+:[0-9]+|ipc://\S+)$", max_length=256)]
_MOST_PATH = 107  # bytes of a Unix socket's path


def _check_endpoint(endpoint: str) -> None:
    """Raise `ValueError` for what ZeroMQ refuses when it connects, or never connects to."""
    transport, _, address = endpoint.partition("://")
    if transport == "tcp" and "*" in address:
        raise ValueError(f"{endpoint}: a server binds all addresses with *: give the host to connect to in its place")
    if transport == "ipc" and len(address.encode()) > _MOST_PATH:
        raise ValueError(f"{endpoint}: the path has {len(address.encode())} bytes, the limit is {_MOST_PATH}")
    if transport == "tcp" and not 1 <= int(address.rpartition(":")[2]) <= 65_535:
        raise ValueError(f"{endpoint}: a port is from 1 to 65535")


Urls = Annotated[str, Meta(min_length=1)] | Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)]
Port = Annotated[int, Meta(ge=1, le=65_535)]


def _urls(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return base URLs without a trailing slash."""
    return tuple(url.rstrip("/") for url in ((given,) if isinstance(given, str) else given))


class PrefillServers(Section, frozen=True):
    """Separate prefill servers of `engine = "openai"`: they compute the prompts; those at `model.url` generate the
    answers from their KV.

    - `url`: base URL of the server, ending with `/v1`, or a list of several.
    - `bootstrap_port`: of SGLang's servers: their `--disaggregation-bootstrap-port` (SGLang's default is 8998), or a
      list with one for each URL. Without, they are vLLM's, whose requests name the KV by `kv_transfer_params`.
    """

    url: Urls
    bootstrap_port: Port | Annotated[tuple[Port, ...], Meta(min_length=1, max_length=64)] | None = None

    @property
    def transfer(self) -> Literal["vllm", "sglang"]:
        """The engine, which determines how requests name the KV."""
        return "vllm" if self.bootstrap_port is None else "sglang"

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of the servers."""
        return _urls(self.url)

    @property
    def ports(self) -> dict[str, int]:
        """The bootstrap servers' ports by URL; 0 of vLLM's servers."""
        given = self.bootstrap_port or 0
        each = (given,) * len(self.urls) if isinstance(given, int) else given
        return dict(zip(self.urls, each, strict=True))


class OpenAiSection(ServedSection, frozen=True, kw_only=True, tag_field="engine", tag="openai"):
    """`engine = "openai"`: OpenAI-compatible servers that run already.

    - `url`: base URL of the server, ending with `/v1`, or a list of several.
    - `api_key_file`: file whose first line is the servers' API key.
    - `kv_events`: ZeroMQ endpoints, one for each URL, then for each of `prefill`, where vLLM publishes what it has
      cached (`endpoint` of its `--kv-events-config`): requests go to what holds their prefix. Empty: to what was sent
      it before.
    - `kv_events_replay`: their `replay_endpoint`s, for servers that run before the node starts.
    """

    url: Urls
    api_key_file: FilePath = ""
    prefill: PrefillServers | None = None
    kv_events: Annotated[tuple[EventEndpoint, ...], Meta(max_length=64)] = ()
    kv_events_replay: Annotated[tuple[EventEndpoint, ...], Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay repeats what kv_events published: set kv_events, too")
        for endpoint in (*self.kv_events, *self.kv_events_replay):
            _check_endpoint(endpoint)
        servers = len(self.urls) + len(self.prefill.urls if self.prefill is not None else ())
        for name, given in (("kv_events", self.kv_events), ("kv_events_replay", self.kv_events_replay)):
            if given and len(given) != servers:
                raise ValueError(f"{name} has {len(given)} endpoints for {servers} servers: expected one for each")

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of the servers; with `prefill`, of those that generate the answers."""
        return _urls(self.url)

    @property
    def described(self) -> dict[str, str]:
        """What each server does, by URL, for operators."""
        if (prefill := self.prefill) is None:
            return dict.fromkeys(self.urls, "prefill and decode")
        roles = dict.fromkeys(self.urls, "decode")
        for url, port in prefill.ports.items():
            by = "kv_transfer_params" if prefill.transfer == "vllm" else f"SGLang's bootstrap at port {port}"
            roles[url] = f"prefill, KV by {by}"
        return roles


class VllmStage(Section, frozen=True):
    """Disaggregated stages of `engine = "vllm"`: prefill instances compute the prompts and hand their KV over to decode
    instances, which generate the answers.

    Each stage sets these keys for itself, in place of those of `[model]`. Its `extra_args` follow those of `[model]`.
    """

    instances: Annotated[int, Meta(ge=1, le=16)] = 1
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    extra_args: tuple[str, ...] = ()


class VllmSection(ServedSection, frozen=True, kw_only=True, tag_field="engine", tag="vllm"):
    """`engine = "vllm"`: the node starts and supervises vLLM's API servers.

    - `path`: what vLLM loads, a directory or a name on Hugging Face's hub; "": `name`.
    - `python`: interpreter of the environment in which vLLM is installed.
    - `instances`: number of servers.
    - `tensor_parallel_size`: as in vLLM; an instance uses so many GPUs.
    - `devices`: GPUs of the instances, in order. Empty: the first GPUs of the machine. ["cpu"]: no GPU.
    - `extra_args`, `environment`: further arguments and environment variables of vLLM's processes.

    With `[model.prefill]` and `[model.decode]` (both) each stage has its own instances, prefill's on the first of
    `devices`. KV is transferred between them by NixlConnector if vLLM's environment has NIXL, else by TrinityKvFiles,
    which is part of Trinity and uses files of this machine, or as `--kv-transfer-config` in the `extra_args` of both
    says.
    """

    # names on Hugging Face's hub contain a slash, too
    path: Annotated[str, Meta(extra={"is_path": lambda path: path.startswith(("/", ".", "~"))})] = ""
    python: Annotated[str, Meta(min_length=1, extra={"is_path": lambda python: "/" in python})] = "python3"
    instances: Annotated[int, Meta(ge=1, le=16)] = 1
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    devices: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    environment: dict[Variable, str] = msgspec.field(default_factory=dict)
    prefill: VllmStage | None = None
    decode: VllmStage | None = None

    @property
    def loads(self) -> str:
        """The model that vLLM loads."""
        return self.path or self.name

    @property
    def stages(self) -> dict[Stage, VllmStage]:
        """The stages in the order of their devices; {"": …} if every instance serves whole requests."""
        if self.prefill is not None and self.decode is not None:
            return {"prefill": self.prefill, "decode": self.decode}
        return {"": VllmStage(instances=self.instances, tensor_parallel_size=self.tensor_parallel_size)}

    @property
    def on_cpu(self) -> bool:
        return self.devices == ("cpu",)

    @property
    def gpus(self) -> tuple[tuple[str, ...], ...]:
        """Names of each instance's GPUs, empty on a CPU. Their number is checked only when the plan is made."""
        each = [stage.tensor_parallel_size for stage in self.stages.values() for _ in range(stage.instances)]
        if self.on_cpu:
            return ((),) * len(each)
        names = iter(self.devices or tuple(f"cuda:{number}" for number in range(sum(each))))
        return tuple(tuple(itertools.islice(names, size)) for size in each)
