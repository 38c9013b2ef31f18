"""`[prompts]` and `[probes]`: where passages stand in a prompt, and when an answer asks again while it is written."""

from typing import Annotated, Literal

from msgspec import Meta

from runtime.node.engine_config import Section

PassagePlace = Literal["system", "question"]
ProbeTrigger = Literal["every", "drift", "unsure"]


class PromptsSection(Section, frozen=True):
    """Where passages stand in a chat, of requests that do not say it: in the "system" message, before the conversation,
    or before the text of the last "question", behind it. There they leave what was said before as it was: its KV is
    used again (docs/prompts.md).
    """

    passages: PassagePlace = "system"


class ProbesSection(Section, frozen=True):
    """When an answer asks again, of requests with `retrieval.every_tokens` that do not say it.

    `trigger` "every": after each `every_tokens` tokens. "drift": then too, but what is found goes in only if the text
    has left its passages: the nearest of them is farther from its last words than `drift_distance` (as the collection's
    metric has it; of cosine 1 - similarity), or not among the `k` nearest at all. "unsure": `every_tokens` tokens after
    the last time at the earliest, once the entropy of the next token's distribution (at temperature 1) is over
    `unsure_nats`; only the node's own engine can tell.
    """

    trigger: ProbeTrigger = "every"
    drift_distance: Annotated[float, Meta(gt=0, le=1e6)] = 0.5
    unsure_nats: Annotated[float, Meta(gt=0, le=100)] = 2.0
