"""`[prompts]` and `[probes]`: how passages are inserted into a prompt, and when a running answer is probed."""

from typing import Annotated, Literal

from msgspec import Meta

from runtime.node.engine_config import Section

PassagePlace = Literal["system", "question"]
ProbeTrigger = Literal["every", "drift", "unsure"]


PassageTokens = Annotated[int, Meta(ge=16, le=65_536)]


class PromptsSection(Section, frozen=True):
    """Defaults of prompts with passages.

    - `passages`: where passages are inserted: "question" puts them before the text of the last question, so that the
      earlier turns keep their position and their KV is reused; "system" puts them into the system message, before the
      conversation (docs/prompts.md).
    - `passage_tokens`: maximum number of tokens of the passages that are inserted before the first token. With another
      engine the node has no tokenizer: this limit and that of probes are estimated from bytes.
    """

    passages: PassagePlace = "question"
    passage_tokens: PassageTokens = 768


class ProbesSection(Section, frozen=True):
    """Defaults of probes, for requests with `retrieval.every_tokens`.

    - `trigger`: "every" probes after each `every_tokens` tokens. "drift" probes as often, but inserts the passages only
      if the text has drifted away from those in use: the nearest of them is farther from the last words than
      .5 in the collection's metric (for cosine 1 - similarity), or not among the `k` nearest. "unsure" probes when the
      entropy of the next token's distribution (at temperature 1) exceeds 2 nats, at the earliest `every_tokens` tokens
      after the last probe; only the node's own engine supports it. Requests set other thresholds themselves
      (`retrieval.probe_threshold`).
    - `passage_tokens`: maximum number of tokens of the passages that a probe inserts.
    """

    trigger: ProbeTrigger = "every"
    passage_tokens: PassageTokens = 192
