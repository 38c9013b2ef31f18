"""A search's parameters on their way through a ring: checked and packed by the client, checked again by the pool.

Neither trusts the other: what the client refuses at once is what the pool would refuse after the trip.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ipc.descriptors import (
    CANCEL,
    MAX_I64,
    MAX_U16,
    PARAMETERS,
    SEARCH,
    SEARCH_ARENA,
    STAGE_CODES,
    STAGES,
    Parameters,
)
from ipc.errors import InvalidArgument

Choice = tuple[str, str, int, int, int, int | None]
"""collection, stage, k, top_m, search_width, patience, as a client says them"""


class Limits(NamedTuple):
    """What a pool serves: vector dimension by collection, in the order of their codes, and the largest k and top_m."""

    collections: Mapping[str, int]
    max_k: int
    max_top_m: int

    @classmethod
    def checked(cls, collections: Mapping[str, int], max_k: int, max_top_m: int) -> "Limits":
        """Raises `InvalidArgument`."""
        if not collections or min(collections.values()) < 1:
            raise InvalidArgument(f"at least one collection, dimensions of at least 1; got {dict(collections)}")
        if not 1 <= max_k <= MAX_U16 or not 1 <= max_top_m <= MAX_U16:
            raise InvalidArgument(f"max_k {max_k} and max_top_m {max_top_m} must be within 1..{MAX_U16}")
        return cls(dict(collections), max_k, max_top_m)


class Packed(NamedTuple):
    """Parameters as three words of a request's header, and the dimension that its vector must have."""

    words: tuple[int, int, int]
    dim: int


class Unpacked(NamedTuple):
    """What a pool makes of a request's 24 bytes: its kind; a search's parameters, or the status that refuses them."""

    kind: int
    refusal: str
    parameters: Parameters | None
    dim: int


def pack(choice: Choice, epoch: int, limits: Limits, kind: int = SEARCH) -> Packed:
    """For a client; `kind` SEARCH or SEARCH_ARENA. Raises `InvalidArgument` that names the value and the limit."""
    collection, stage, k, top_m, search_width, patience = choice
    if collection not in limits.collections:
        raise InvalidArgument(f"no collection {collection!r}; there are {sorted(limits.collections)}")
    if stage not in STAGE_CODES:
        raise InvalidArgument(f"stage must be one of {STAGES}, got {stage!r}")
    for name, value, most in (
        ("k", k, limits.max_k),
        ("top_m", top_m, limits.max_top_m),
        ("search_width", search_width, MAX_U16),
        ("patience", 1 if patience is None else patience, MAX_U16),
    ):
        if not 1 <= value <= most:
            raise InvalidArgument(f"{name} {value} must be within 1..{most}")
    code, dim = list(limits.collections).index(collection), limits.collections[collection]
    return Packed(_words(epoch, kind, STAGE_CODES[stage], code, k, top_m, search_width, patience or 0, dim), dim)


def check_deadline(deadline_ns: int) -> None:
    """Raises `InvalidArgument` for what does not fit a request's header."""
    if type(deadline_ns) is not int or not 0 <= deadline_ns <= MAX_I64:
        raise InvalidArgument(f"deadline_ns must be an integer within 0..{MAX_I64}, got {deadline_ns!r}")


def pack_cancel(epoch: int) -> bytes:
    """The 24 bytes of a cancellation."""
    return PARAMETERS.pack(epoch, CANCEL, 0, 0, 0, 0, 0, 0, 0)


def _words(*fields: int) -> tuple[int, int, int]:
    a, b, c = struct.unpack("<3q", PARAMETERS.pack(*fields))
    return a, b, c


def unpack(packed: bytes, epoch: int, limits: Limits) -> Unpacked:
    """For a pool: nothing is trusted, and nothing is allocated by what it says."""
    found, kind, stage, collection, k, top_m, width, patience, dim = PARAMETERS.unpack(packed)
    if found != epoch:
        return Unpacked(kind, "stale_epoch", None, 0)
    if kind not in (SEARCH, SEARCH_ARENA):
        return Unpacked(kind, "", None, 0)
    names = list(limits.collections)
    if (
        stage < len(STAGES)
        and collection < len(names)
        and dim == limits.collections[names[collection]]
        and 1 <= k <= limits.max_k
        and 1 <= top_m <= limits.max_top_m
        and width >= 1
    ):
        return Unpacked(kind, "", Parameters(names[collection], STAGES[stage], k, top_m, width, patience or None), dim)
    return Unpacked(kind, "invalid_request", None, 0)
