"""Packing of a `SearchSpec` into a request's header, with the client's validation; the pool validates it again.

The client applies the same limits as the pool, so that invalid requests fail before they are sent.
"""

import struct
from typing import NamedTuple

from ipc.errors import InvalidArgument
from ipc.ring.descriptors import (
    CANCEL,
    MAX_U16,
    PARAMETERS,
    SEARCH,
    STAGE_CODES,
    STAGES,
    SearchSpec,
)
from ipc.session.messages import Catalogue


class Limits(NamedTuple):
    """Limits of a session's requests. A collection's code is its index in `catalogue.served`."""

    catalogue: Catalogue
    max_k: int
    max_top_m: int

    def code(self, collection: str) -> int:
        """Return the code of a served collection. Raises `InvalidArgument`."""
        for code, served in enumerate(self.catalogue.served):
            if served.name == collection:
                return code
        raise InvalidArgument(
            f"no collection {collection!r}; available: {sorted(served.name for served in self.catalogue.served)}"
        )


class Packed(NamedTuple):
    """A spec without its deadline and filter, as three words of a request's header, and the dimension of its vector."""

    words: tuple[int, int, int]
    dim: int

    def with_filter(self, slot: int) -> tuple[int, int, int]:
        """Return the words of a request whose filter is in this slot."""
        a, b, c = self.words
        return a, b | slot << 16, c


def pack(spec: SearchSpec, epoch: int, limits: Limits, default_top_m: int = 1, kind: int = SEARCH) -> Packed:
    """Validate and pack a spec; `kind`: SEARCH or SEARCH_ARENA. Raises `InvalidArgument` with the value and the limit.

    A spec without top_m gets `default_top_m`, or k if that is larger, up to the pool's limit.
    """
    code, k = limits.code(spec.collection), spec.k
    top_m = min(max(default_top_m, k), limits.max_top_m) if spec.top_m is None else spec.top_m
    if spec.stage not in STAGE_CODES:
        raise InvalidArgument(f"stage must be one of {STAGES}, got {spec.stage!r}")
    for name, value, most in (
        ("k", k, limits.max_k),
        ("top_m", top_m, limits.max_top_m),
        ("search_width", spec.search_width, MAX_U16),
        ("patience", 1 if spec.patience is None else spec.patience, MAX_U16),
    ):
        if not 1 <= value <= most:
            raise InvalidArgument(f"{name} {value} must be within 1..{most}")
    if not 0 <= spec.flow <= MAX_U16:
        raise InvalidArgument(f"flow {spec.flow} must be within 0..{MAX_U16}")
    dim, stage = limits.catalogue.served[code].dim, STAGE_CODES[spec.stage]
    parameters = PARAMETERS.pack(
        epoch, kind, stage, code, k, 0, top_m, spec.search_width, spec.patience or 0, dim, spec.flow
    )
    a, b, c = struct.unpack("<3q", parameters)
    return Packed((a, b, c), dim)


def pack_cancel(epoch: int) -> bytes:
    """Return the 24 parameter bytes of a cancellation."""
    return PARAMETERS.pack(epoch, CANCEL, *[0] * 9)
