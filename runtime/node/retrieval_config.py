"""`[rerank]`, `[prompts]` and `[probes]`: how passages are ordered, inserted into a prompt, and searched for again."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Literal

from msgspec import Meta

from runtime.node.engine_config import FilePath, Section

ProbeMode = Literal["wait", "prefetch"]
TRIGGERS = ("every", "drift", "unsure")
"""The built-in probe triggers (`runtime.serving.triggers`)."""


PROBE_TOKENS = 192
"""Maximum number of tokens of the passages that a probe inserts, unless its request says another one: about a
passage."""


class RerankSection(Section, frozen=True):
    """Reranking of the passages that a search has found, by a cross-encoder (docs/rerank.md).

    - `model`: directory of a cross-encoder in ONNX form, or the name of the model at `url`. "": no reranking.
    - `url`: a server with the route that vLLM, Jina and Cohere share, `POST URL/rerank`. "": `model` is a directory.
    - `key_file`: file whose first line is the server's API key.

    After two seconds the passages stay in the order of the search: twice what one core took for the candidates of four
    passages (16 pairs of 170 tokens) with a model of six layers. Requests may set another limit.
    """

    model: Annotated[str, Meta(max_length=4096)] = ""
    url: Annotated[str, Meta(pattern=r"^(https?://[^\s?#@]+)?\Z")] = ""
    key_file: FilePath = ""

    def __post_init__(self) -> None:
        if self.url and not self.model:
            raise ValueError(f"url = {self.url!r} requires model, the model's name there")
        if self.key_file and not self.url:
            raise ValueError(f"key_file = {self.key_file!r} requires url")


class PromptsSection(Section, frozen=True):
    """Defaults of prompts with passages.

    - `passage_tokens`: maximum number of tokens of the passages that are inserted before the first token, and of what a
      request may set for a probe, whose default is 192. With another engine the node has no tokenizer: these limits are
      estimated from bytes.
    """

    passage_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 768


class ProbesSection(Section, frozen=True):
    """Defaults of probes, for requests with retrieval that do not say it themselves (docs/prompts.md).

    - `every_tokens`: an answer probes after as many tokens; 0: only answers whose request sets `every_tokens` do.
    - `mode`: during a probe an answer waits, or continues and inserts the passages when they arrive ("prefetch").
    - `trigger`: when an answer probes: "every", "drift", "unsure" (only with the node's own engine), or the name of an
      installed trigger (an entry point of the group `trinity.triggers`).
    """

    every_tokens: Annotated[int, Meta(ge=0, le=1_048_576)] = 0
    mode: ProbeMode = "wait"
    trigger: Annotated[str, Meta(min_length=1, max_length=64)] = "every"


@cache
def installed_triggers() -> dict[str, EntryPoint]:
    """Return the triggers of installed packages, by name. Reads the packages' metadata, some 10 ms."""
    return {entry.name: entry for entry in entry_points(group="trinity.triggers") if entry.name not in TRIGGERS}
