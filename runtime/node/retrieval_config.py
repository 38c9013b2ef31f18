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
    """Probes of requests with `retrieval.every_tokens`; a request says when it probes (`retrieval.probe_trigger`).

    - `passage_tokens`: maximum number of tokens of the passages that a probe inserts.
    """

    passage_tokens: PassageTokens = 192
