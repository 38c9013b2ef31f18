"""Workload parameters that a trace does not contain: retrieval, probes, and SLOs."""

from typing import Annotated

import msgspec
from msgspec import Meta

from runtime.node.retrieval_config import PROBE_TOKENS


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Retrieval of a trace's requests, whose prompts are assumed to contain their passages.

    Each request queries the pool once before prefill, and every `probe_every_tokens` during decode (0: never). A share
    `probe_hit` of the probes returns new passages, of `probe_tokens` tokens. A query takes
    top_m / search_width extends plus 1 to 3.
    """

    retrieval: bool = True
    probe_every_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 32
    probe_hit: Annotated[float, Meta(ge=0, le=1)] = 0.3
    probe_tokens: Annotated[int, Meta(ge=0, le=65_536)] = PROBE_TOKENS


class Slos(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """SLOs of a request: its TTFT is at most `ttft_s`, and its mean TPOT at most `tpot_s`."""

    ttft_s: Annotated[float, Meta(gt=0)] = 1.0
    tpot_s: Annotated[float, Meta(gt=0)] = 0.025
