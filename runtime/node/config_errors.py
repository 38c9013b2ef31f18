"""Error messages for the configuration, and descriptions of its keys' types, derived from the types of the sections."""

import difflib
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.inspect import (
    AnyType,
    BoolType,
    DictType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)


def allowed_values(config: type[msgspec.Struct], path: str) -> str:
    """Return the values that a key accepts, such as "one of 'a', 'b'" or "an integer from 1 to 9 or 'auto'".

    `path` is the key's path in msgspec's notation: "pool.slots", "collections[1].verify". Returns "" if the key has no
    named choices: msgspec's own message is used then.
    """
    kinds = _types_at(config, path)
    names = sorted({repr(name) for kind in kinds if isinstance(kind, LiteralType) for name in kind.values})
    if not names:
        return ""
    numbers = [
        f"an {_range(kind)}" if isinstance(kind, IntType) else f"a {_range(kind)}"
        for kind in kinds
        if isinstance(kind, IntType | FloatType)
    ]
    named = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return " or ".join([*numbers, named])


def describe_type(kind: Type) -> str:
    """Describe the values of a key of this type: "integer from 1 to 9", "`true`, `false`", "list: string"."""
    if isinstance(kind, Metadata):
        return describe_type(kind.type)
    if isinstance(kind, VarTupleType):
        limit = "" if kind.max_length is None else f" of at most {kind.max_length}"
        return f"list{limit}: {describe_type(kind.item_type)}"
    if isinstance(kind, UnionType):
        return " or ".join(describe_type(member) for member in kind.types if not isinstance(member, NoneType))
    if isinstance(kind, LiteralType):
        return ", ".join(f'`"{name}"`' for name in kind.values)
    if isinstance(kind, IntType | FloatType):
        return _range(kind)
    if isinstance(kind, StrType):
        return "string" + (f" matching `{kind.pattern.removesuffix(_END)}`" if kind.pattern else "")
    if isinstance(kind, BoolType):
        return "`true`, `false`"
    if isinstance(kind, DictType):
        values = "" if isinstance(kind.value_type, AnyType) else f": {describe_type(kind.value_type)}"
        return f"table{values}"
    raise TypeError(f"no description of {kind}")


_END = r"\Z"


REMOVED = {
    "answer_cache.embedder": "questions are embedded by all-minilm-l6-v2",
    "answer_cache.enabled": "remove it; the cache is on if answer_cache.threshold, such as 0.97, is set",
    "answer_cache.entries": "the latest 1,000 answers are kept",
    "collections.demand": "a collection demands an attribute if it was built with --demand",
    "control.enabled": "the control loop runs",
    "handover.order": "prefill computes a prompt before decode reserves room for it",
    "decode.threads": "a worker computes with a thread on each of its decode.cores",
    "http.max_connections": "eight times as many connections as http.max_in_flight may be open",
    "http.max_connections_per_peer": "one client address may have half of the connections",
    "http.restart_wait_s": "requests wait for 60 s for a worker, with vLLM for node.start_s",
    "http.vllm_metrics": "/metrics has vLLM's names, too",
    "http.restarts": "a request is restarted at most three times",
    "model.context_tokens": "the server reports it; with vLLM set --max-model-len in extra_args",
    "model.kv_block_tokens": "a KV block has 32 tokens",
    "model.kv_connector": "it is NIXL or files; extra_args of both stages may have --kv-transfer-config",
    "model.kv_connector_extra_config": "extra_args of both stages may have --kv-transfer-config",
    "model.pipeline_parallel_size": "the GPUs of a node share tensors: set tensor_parallel_size",
    "model.prefill.pipeline_parallel_size": "the GPUs of a node share tensors: set tensor_parallel_size",
    "model.decode.pipeline_parallel_size": "the GPUs of a node share tensors: set tensor_parallel_size",
    "model.prefill.transfer": "with bootstrap_port, such as 8998, the servers are SGLang's, without vLLM's",
    "model.prefill.devices": "set the GPUs of all instances in model.devices, prefill's first",
    "model.decode.devices": "set the GPUs of all instances in model.devices, prefill's first",
    "node.heartbeat_s": "a worker without a heartbeat for 30 s is killed",
    "prefill.threads": "a worker computes with a thread on each of its prefill.cores",
    "pool.queue": "4,096 queries may wait",
    "pool.stages": 'a worker of placement "own" answers both stages; those of "with-prefill+own" one first',
    "pool.max_top_m": "a query's top_m is at most 512",
    "pool.search_width": "it is 4, and a query may set another one",
    "pool.threads": "a pool worker searches with one thread",
    "probes.passage_tokens": "a probe inserts at most 192 tokens, or as many as a request says",
    "prompts.passages": "passages are inserted before the last question",
    "remote": "search the nodes over HTTP and merge their passages by distance",
    "tracing": "spans are exported if OTEL_EXPORTER_OTLP_ENDPOINT is set",
    "rerank.timeout_s": "passages stay in the order of the search after 2 s, or after what a request says",
    "stores.embedder": "passages are embedded by all-minilm-l6-v2",
    "stores.max_file_mib": "a file has at most 512 MiB",
    "stores.max_files": "the limit is 100,000 files",
    "stores.max_responses": "the latest 10,000 responses are kept",
    "stores.max_stores": "the limit is 10,000 stores",
    "stores.response_ttl_s": "responses are kept for 30 days",
}
"""Keys that earlier versions had: what holds now."""

_AT = re.compile(r" - at `\$([^`]*)`\Z")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*?)`")


def explain_error(message: str, raw: dict[str, Any], config: type[msgspec.Struct]) -> str:
    """Rewrite msgspec's error message about `raw`: with the key's dotted path, its value, the allowed values if they
    are named, and the nearest known key if it is unknown."""
    at = _AT.search(message)
    path = at.group(1).lstrip(".") if at else ""
    reason = _AT.sub("", message)
    if unknown := _UNKNOWN.match(reason):
        key = unknown.group(1)
        shown = f"{path}.{_shown(key)}".removeprefix(".")
        if removed := REMOVED.get(re.sub(r"\[\d+\]", "", shown)):
            return f"{shown}: this key was removed: {removed}"
        return f"{shown}: unknown key{_nearest(_known(config, path, raw), key)}"
    if missing := _MISSING.match(reason):
        return f"{path}.{missing.group(1)}".lstrip(".") + ": required key is missing"
    value = _at(raw, path)
    shown = f" = {value!r}" if isinstance(value, str | int | float | bool) else ""
    choices = allowed_values(config, path)
    return f"{path}{shown}: " + (f"expected {choices}" if choices else f"{reason[0].lower()}{reason[1:]}")


def _shown(key: str) -> str:
    """Quote a key that contains other characters than letters, digits, `_` and `-`."""
    return key if re.fullmatch(r"[\w-]+", key) else repr(key)


def _at(raw: Any, path: str) -> Any:
    """Return the value at a path, None if there is none."""
    for part in _parts(path):
        if isinstance(raw, dict):
            raw = raw.get(part)
        elif isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return None
    return raw


def _known(config: type[msgspec.Struct], path: str, raw: dict[str, Any]) -> list[str]:
    """Return the known keys of the section at a path. Of several section types (engines) the one that `raw` selects."""
    table = _at(raw, path)
    for kind in _types_at(config, path):
        if isinstance(kind, StructType) and (kind.tag_field is None or table.get(kind.tag_field) == kind.tag):
            return [field.encode_name for field in kind.fields]
    return []


def _nearest(known: list[str], key: str) -> str:
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _parts(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _types_at(config: type[msgspec.Struct], path: str) -> list[Type]:
    kinds: list[Type] = [inspect.type_info(config)]
    for part in _parts(path):
        kinds = [kind for outer in kinds for kind in _under(outer, part)]
    return kinds


def _under(kind: Type, part: str) -> Iterator[Type]:
    """Yield the types of a key or list position of a value of this type; of a union, those of every member."""
    if isinstance(kind, VarTupleType):
        yield from _members(kind.item_type)
    elif isinstance(kind, StructType):
        if part == kind.tag_field:
            yield LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == part:
                yield from _members(field.type)


def _members(kind: Type) -> tuple[Type, ...]:
    kind = kind.type if isinstance(kind, Metadata) else kind
    return kind.types if isinstance(kind, UnionType) else (kind,)


def _range(kind: IntType | FloatType) -> str:
    name = "integer" if isinstance(kind, IntType) else "number"
    bounds = ((" above", kind.gt), (" from", kind.ge), (" below", kind.lt), (" to", kind.le))
    return name + "".join(f"{word} {bound}".removesuffix(".0") for word, bound in bounds if bound is not None)
