"""A `SearchSpec` as a request's header takes it: checked and packed by the client, checked again by the pool.

Neither trusts the other: what the client refuses at once is what the pool would refuse after the trip.
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
    """What a session's requests may ask for: a collection's code is its place in `catalogue.served`."""

    catalogue: Catalogue
    max_k: int
    max_top_m: int

    def code(self, collection: str) -> int:
        """Of a collection that is served. Raises `InvalidArgument`."""
        for code, served in enumerate(self.catalogue.served):
            if served.name == collection:
                return code
        raise InvalidArgument(
            f"no collection {collection!r}; there are {sorted(served.name for served in self.catalogue.served)}"
        )


class Packed(NamedTuple):
    """A spec but for its deadline and its filter, as three words of a request's header, and the dimension its vector
    must have."""

    words: tuple[int, int, int]
    dim: int

    def with_filter(self, place: int) -> tuple[int, int, int]:
        """The words of a request whose filter stands in this place."""
        a, b, c = self.words
        return a, b | place << 16, c


def pack(spec: SearchSpec, epoch: int, limits: Limits, usual_top_m: int = 1, kind: int = SEARCH) -> Packed:
    """For a client; `kind` SEARCH or SEARCH_ARENA. Raises `InvalidArgument` that names the value and the limit.

    A spec that names no top_m gets the usual one, or k if that is more, as far as the pool allows.
    """
    code, k = limits.code(spec.collection), spec.k
    top_m = min(max(usual_top_m, k), limits.max_top_m) if spec.top_m is None else spec.top_m
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
    dim, stage = limits.catalogue.served[code].dim, STAGE_CODES[spec.stage]
    parameters = PARAMETERS.pack(epoch, kind, stage, code, k, 0, top_m, spec.search_width, spec.patience or 0, dim)
    a, b, c = struct.unpack("<3q", parameters)
    return Packed((a, b, c), dim)


def pack_cancel(epoch: int) -> bytes:
    """The 24 bytes of a cancellation."""
    return PARAMETERS.pack(epoch, CANCEL, 0, 0, 0, 0, 0, 0, 0, 0)
