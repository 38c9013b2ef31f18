"""Request bodies as strict pydantic models (parsed by `parsing.py`), and their conversion to the workers' messages."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from runtime.errors import InvalidFilter, InvalidRequest
from runtime.node.retrieval_config import ProbeMode, ProbesSection
from runtime.retrieval.attributes.filters import filter_bytes, parse_filter
from runtime.serving.http.parsing import StrictModel, field_error, given, json_name
from runtime.serving.http.ranking import RerankOptions
from runtime.serving.messages import Message, Sampling
from runtime.serving.triggers import make_trigger, trigger_type

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENS = 2**31 - 1
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_PRIORITY, MAX_TIER = 1000, 15
_TIER_S = 100_000  # more than any two priorities and waits differ by
_HINTS = ("cache_control", "prompt_cache_breakpoint")  # of content parts: prefix caching is automatic
DEFAULT_HYBRID = 0.5  # weight of the keyword search with `hybrid: true`


# ---- validators of fields with several formats


def filter_at(param: str) -> Callable[[object], object]:
    """Return a validator that parses the filter in `param` (None if null) and raises InvalidFilter."""

    def validate(value: object) -> object:
        if value is None:
            return None
        try:
            parsed = parse_filter(value)
            filter_bytes(parsed)
        except InvalidFilter as error:
            raise InvalidFilter(error.message, param) from error
        return parsed

    return validate


def _validate_hybrid(value: object) -> object:
    if isinstance(value, bool):
        return DEFAULT_HYBRID * value
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise field_error(f"hybrid must be true, false or the keywords' weight between 0 and 1, not {given(value)}")
    return float(value)


Hybrid = Annotated[float, BeforeValidator(_validate_hybrid)]
"""Weight of the keyword search in a hybrid search; 0 for vector search only."""


def _validate_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise field_error("stop must be a string or an array of strings")
    if len(stops) > MAX_STOPS:
        raise field_error(f"stop has {len(stops)} strings, the limit is {MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise field_error(f"a stop string has {len(stop)} characters, allowed are 1 to {MAX_STOP_CHARS}")
    return stops


def _validate_prompt(value: object) -> object:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise field_error(f"prompt has {len(value)} prompts, the limit is 1 per request")
        value = value[0]
    if isinstance(value, list):
        for token in value:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN_ID:
                raise field_error(f"prompt must be a string or token ids between 0 and {MAX_TOKEN_ID}")
    elif not isinstance(value, str):
        raise field_error(f"prompt must be a string or an array of token ids, not {json_name(value)}")
    if not value:
        raise field_error("prompt is empty")
    return value


def _validate_content(value: object) -> object:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise field_error(f"content must be a string or an array of text parts, not {json_name(value)}")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise field_error('content parts must be {"type": "text", "text": ...}; others are not supported')
        for name in part.keys() - {"type", "text"}:
            if name not in _HINTS:
                raise field_error(f"content parts with {name[:64]!r} are not supported")
        texts.append(part["text"])
    return "".join(texts)


def _validate_role(value: object) -> object:
    if value == "developer":  # OpenAI's newer name of it
        return "system"
    if value not in ("system", "user", "assistant"):
        raise field_error(f"role must be system, developer, user or assistant, not {given(value)}")
    return value


def chat_message(value: object) -> object:
    """Validate a turn: keep role and content, refuse other fields that would change the answer."""
    if not isinstance(value, dict):
        raise field_error(f"a message must be an object, not {json_name(value)}")
    for name, entry in value.items():
        if name not in ("role", "content", "name") and entry not in (None, [], {}, ""):
            raise field_error(f"messages with {name[:64]!r} are not supported")
    return {name: entry for name, entry in value.items() if name in ("role", "content")}


def _validate_retrieval(value: object) -> object:
    if not isinstance(value, dict) and value is not False:
        raise field_error(f"retrieval must be an object or false, not {given(value)}")
    return None if value is False else value


def _validate_rerank(value: object) -> object:
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, dict):
        raise field_error(f"rerank must be an object, true or false, not {given(value)}")
    return value


def _validate_obfuscation(value: object) -> object:
    if value is not False:
        raise field_error(f"include_obfuscation must be false, not {given(value)}")
    return value


RerankField = Annotated[RerankOptions | None, BeforeValidator(_validate_rerank)]
"""Whether the passages of a search are reranked: true, or an object with a limit of its time."""


# ---- bodies


class StreamOptions(StrictModel, extra="forbid"):
    """`include_usage` adds a last chunk with the usage, `continuous_usage_stats` the usage so far to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool, BeforeValidator(_validate_obfuscation)] = False


class ProbeOptions(StrictModel):
    """Probes of an answer, `every_tokens` tokens (0: never); what is left out is as the node's configuration says.

    During a probe the answer waits, or continues and inserts the passages when they arrive ("prefetch").
    `probe_trigger` with `probe_threshold` says when to probe.
    """

    every_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    probe_mode: ProbeMode | None = None
    probe_trigger: str | None = None
    probe_threshold: float | None = Field(None, gt=0, le=1e6)

    def with_defaults(self, probes: ProbesSection, field: str) -> dict[str, Any]:
        """Return the fields of a `Retrieval` that say when and how to probe. `field`: of the body, for errors.

        Raises InvalidRequest for an unknown trigger, values that it refuses, and a threshold that it does not use.
        """
        trigger = self.probe_trigger or probes.trigger
        default = trigger_type(trigger).default_threshold
        if self.probe_threshold is not None and default is None:
            raise InvalidRequest(
                f'probe_threshold requires a probe_trigger that has one, as "drift" and "unsure"; it is {trigger!r}',
                f"{field}.probe_threshold",
            )
        every_tokens = probes.every_tokens if self.every_tokens is None else self.every_tokens
        threshold = self.probe_threshold or default or 0.0
        if every_tokens:
            make_trigger(trigger, every_tokens, threshold)
        mode = self.probe_mode or probes.mode
        return {"every_tokens": every_tokens, "probe_mode": mode, "trigger": trigger, "threshold": threshold}


class RetrievalOptions(ProbeOptions, extra="forbid"):
    """Retrieval of `k` passages of `collection` before prefill, and by probes, which insert at most `probe_tokens`
    tokens each.

    `collection` is optional on a node with one collection. `filter` restricts the passages by attributes, `hybrid` adds
    a keyword search. `rerank`: of the passages before prefill.
    """

    collection: str | None = None
    k: int = Field(4, ge=1, le=MAX_TOKENS)
    probe_tokens: int | None = Field(None, ge=16, le=MAX_TOKENS)
    filter: Annotated[Any, BeforeValidator(filter_at("retrieval.filter"))] = None
    hybrid: Hybrid = 0.0
    rerank: RerankField = None


class ChatMessage(StrictModel):
    """One turn of a chat; content parts are concatenated."""

    role: Annotated[str, BeforeValidator(_validate_role)]
    content: Annotated[str, BeforeValidator(_validate_content)]


class AgentHints(StrictModel):
    """Dynamo's hints of a request. `priority`: higher ones go first. `strict_priority`: a higher tier goes before all
    lower ones. `osl`: expected number of answer tokens. `speculative_prefill` has no effect."""

    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    strict_priority: int = Field(0, ge=0, le=MAX_TIER)
    osl: int = Field(0, ge=0, le=MAX_TOKENS)
    speculative_prefill: bool = False


class NvExt(StrictModel, extra="ignore"):
    """Dynamo's extension of a body; other fields of it are for other engines."""

    agent_hints: AgentHints = Field(default_factory=lambda: AgentHints.model_validate({}))


class Prioritized(StrictModel):
    """Order of a prompt among others. `priority` is vLLM's field: lower ones go first."""

    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    nvext: NvExt = Field(default_factory=NvExt)

    def head_start_s(self) -> float:
        """Return how many seconds before it arrived the prompt counts as received."""
        hints = self.nvext.agent_hints
        return float(hints.priority - self.priority + _TIER_S * hints.strict_priority)


class GenerateBody(Prioritized):
    """Fields of both endpoints. `answer_cache` false: neither read nor store an answer in the cache."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_validate_stop)] = Field([])
    ignore_eos: bool = False
    return_token_ids: bool = False
    answer_cache: bool = True
    retrieval: Annotated[RetrievalOptions | None, BeforeValidator(_validate_retrieval)] = None

    def token_limit(self, default: int) -> int:
        """Return the maximum number of answer tokens; `default` if the body has none."""
        return self.max_tokens if self.max_tokens is not None else default

    def to_sampling(self, default_max_tokens: int, random_seed: int) -> Sampling:
        """Convert to the workers' message. Without a seed `random_seed` is used; negative seeds are mapped to
        0..2^63-1."""
        return Sampling(
            max_tokens=self.token_limit(default_max_tokens),
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            seed=(random_seed if self.seed is None else self.seed) & (2**63 - 1),
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
        )


class ChatLimits(GenerateBody):
    """Token limit of a chat, which has two names."""

    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)

    def token_limit(self, default: int) -> int:
        """Return the limit; `max_completion_tokens` is its newer name. Raises InvalidRequest if the two differ."""
        new = self.max_completion_tokens
        if new is None:
            return super().token_limit(default)
        if self.max_tokens not in (None, new):
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {new}; set one of them",
                "max_completion_tokens",
            )
        return new


class ChatBody(ChatLimits):
    """POST /v1/chat/completions."""

    messages: list[Annotated[ChatMessage, BeforeValidator(chat_message)]] = Field(min_length=1)

    def to_messages(self) -> tuple[Message, ...]:
        """Convert to the workers' messages."""
        return tuple(Message(message.role, message.content) for message in self.messages)


class CompletionBody(GenerateBody):
    """POST /v1/completions; `prompt` is text or token ids."""

    prompt: Annotated[str | list[int], BeforeValidator(_validate_prompt)]
