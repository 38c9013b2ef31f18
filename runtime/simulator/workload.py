"""What a trace does not say: when requests retrieve, how hard their queries are, and what is promised to them."""

from typing import Annotated

import msgspec
from msgspec import Meta


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Retrieval beside the trace's tokens (whose prompts are taken to hold their passages already).

    Each request asks once before prefill, and every `probe_every_tokens` while it decodes (0: never); `probe_hit` of
    the probes bring passages that the row has not seen, `decode.probe_tokens` of them. A query takes top_m /
    search_width extends and 1 to 3 more.
    """

    retrieval: bool = True
    probe_every_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 32
    probe_hit: Annotated[float, Meta(ge=0, le=1)] = 0.3


class Slos(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request is good if its first token came within `ttft_s`, and the others took `tpot_s` each in the mean."""

    ttft_s: Annotated[float, Meta(gt=0)] = 1.0
    tpot_s: Annotated[float, Meta(gt=0)] = 0.025
