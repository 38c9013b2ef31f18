"""`[model]`: the node's own engine, and others."""

import itertools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

# ---- what the tables of a node's configuration have in common


Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file; every subclass is frozen too."""


class ModelSection(Section, frozen=True, tag_field="engine", tag="trinity"):
    """`engine = "trinity"`, the default: a model that the node's own prefill and decode workers run.

    `name` is a packaged name or a directory of transformers files; `context_tokens` the context it is given. KV is kept
    in blocks of `kv_block_tokens` tokens: of a prefix whole blocks are used again; long ones are read faster.

    `weights`: the type that large matrices are kept and multiplied in. bfloat16 takes half the memory and, on a
    processor that multiplies it, about .6 of the time; where two tokens are almost equally likely it may choose another
    than float32 does, and another when a request is computed in other pieces, as after a worker's death. int8, for
    CPUs, is bfloat16 for prompts and, for steps of up to 16 rows, int8 with a scale for each output: decode keeps both,
    and a step takes .67 to .9 of bfloat16's time. "auto" is bfloat16 on GPUs; on a CPU it is int8 with AMX, bfloat16
    where that is multiplied (AVX-512 BF16, ARM's BF16), and float32 elsewhere. float16 keeps three bits more than
    bfloat16 and has a smaller range: for GPUs, and models that were trained in it. KV is of this type on GPUs, and
    float32 on a CPU.
    """

    name: str
    context_tokens: Annotated[int, Meta(ge=64, le=1_048_576)] = 2048
    kv_block_tokens: Annotated[int, Meta(ge=8, le=256)] = 32
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"

    @property
    def row_blocks(self) -> int:
        """KV blocks of a sequence that fills the context."""
        return -(-self.context_tokens // self.kv_block_tokens)


Stage = Literal["", "prefill", "decode"]
"""What an instance of an engine is for: "": whole answers."""


class ServedSection(Section, frozen=True):
    """What the engines have in common whose model runs behind OpenAI's protocol.

    `name` is what the model is called there. `context_tokens` bounds prompt and answer; 0: as many as the server says
    it has. Before the first token a prompt is given passages of about `passage_tokens` tokens at most, by a probe of
    `probe_tokens`: there is no tokenizer here, so both are counted by bytes. A connection is given up after
    `connect_s`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    context_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    passage_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 768
    probe_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 192
    connect_s: Seconds = 5.0


class OpenAiSection(ServedSection, frozen=True, kw_only=True, tag_field="engine", tag="openai"):
    """`engine = "openai"`: servers that run already, at one `url` or several, each with its `/v1`.

    `api_key_file` holds the key that they ask for on its first line.
    """

    url: Annotated[str, Meta(min_length=1)] | Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)]
    api_key_file: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """Each server's, without a slash at its end."""
        given = (self.url,) if isinstance(self.url, str) else self.url
        return tuple(url.rstrip("/") for url in given)


class VllmStage(Section, frozen=True):
    """Of `engine = "vllm"`: prompts are computed by instances of their own, and their KV is handed over to those that
    write the answers.

    Of the keys of `[model]` each stage has these for itself. Its `extra_args` come after those of `[model]`.
    """

    instances: Annotated[int, Meta(ge=1, le=16)] = 1
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    devices: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()

    @property
    def gpus_each(self) -> int:
        """GPUs of an instance."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class VllmSection(ServedSection, frozen=True, kw_only=True, tag_field="engine", tag="vllm"):
    """`engine = "vllm"`: `instances` of vLLM's API server, which the node starts, supervises and asks.

    `path` is what vLLM loads, a directory or a name on Hugging Face's hub; "": `name`. `python` is the interpreter of
    the environment that vLLM is installed in. `devices`: GPUs, tensor_parallel_size × pipeline_parallel_size for each
    instance, in order; none: the machine's first ones; ["cpu"]: none at all. `extra_args` go to vLLM as they are,
    `environment` into its processes'.

    With `[model.prefill]` and `[model.decode]` (both) each stage has instances of its own, and `kv_connector` is how KV
    gets from one to the other: a connector of vLLM's by its name, or a class of `kv_connector_module_path`, a module in
    vLLM's environment; `kv_connector_extra_config` are its options. "auto": NixlConnector where vLLM's environment has
    NIXL, else TrinityKvFiles, which comes with Trinity and uses files of this machine. Prompts of which a decode
    instance has all but `handover_tokens` tokens are computed there; "auto": all but as many as it computes in the time
    that a handover takes, both measured.
    """

    path: str = ""
    python: Annotated[str, Meta(min_length=1)] = "python3"
    instances: Annotated[int, Meta(ge=1, le=16)] = 1
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    devices: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    environment: dict[Variable, str] = msgspec.field(default_factory=dict)
    prefill: VllmStage | None = None
    decode: VllmStage | None = None
    kv_connector: Annotated[str, Meta(min_length=1)] = "auto"
    kv_connector_module_path: str = ""
    kv_connector_extra_config: dict[str, Any] = msgspec.field(default_factory=dict)
    handover_tokens: Literal["auto"] | Annotated[int, Meta(ge=0, le=10_000_000)] = "auto"

    @property
    def loads(self) -> str:
        """What vLLM is told to load."""
        return self.path or self.name

    @property
    def stages(self) -> dict[Stage, VllmStage]:
        """What the instances are for, in the order of their devices; {"": …}: each for all."""
        if self.prefill is not None and self.decode is not None:
            return {"prefill": self.prefill, "decode": self.decode}
        return {
            "": VllmStage(
                instances=self.instances,
                tensor_parallel_size=self.tensor_parallel_size,
                pipeline_parallel_size=self.pipeline_parallel_size,
            )
        }

    @property
    def on_cpu(self) -> bool:
        return self.devices == ("cpu",) or any(stage.devices == ("cpu",) for stage in self.stages.values())

    @property
    def gpus(self) -> tuple[tuple[str, ...], ...]:
        """The names of each instance's GPUs; empty on a CPU. As many as they need only once the plan is made."""
        each = [stage.gpus_each for stage in self.stages.values() for _ in range(stage.instances)]
        if self.on_cpu:
            return ((),) * len(each)
        given = self.devices or tuple(name for stage in self.stages.values() for name in stage.devices)
        names = iter(given or tuple(f"cuda:{number}" for number in range(sum(each))))
        return tuple(tuple(itertools.islice(names, size)) for size in each)
