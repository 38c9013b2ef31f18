"""What the two sides of a session count."""

import msgspec


class ClientStatistics(msgspec.Struct, frozen=True):
    """Counters of a client since it was made, over all its sessions.

    `submitted` requests; `returned` results (of them `lost`); `outstanding` now; submissions refused because the ring
    was `full`; doorbells `rung`; `cancelled` requests; results of a `stale` epoch; sessions `attached`.
    """

    submitted: int
    returned: int
    lost: int
    outstanding: int
    full: int
    rung: int
    cancelled: int
    stale: int
    attached: int


class ServerStatistics(msgspec.Struct, frozen=True):
    """Counters of a server since it was made.

    `clients` now; `attached`, `refused`, `lost` (closed or died) and `evicted` (broke the protocol) clients so far;
    requests `received` and `outstanding`; results `published` and `dropped` (their client was gone); requests refused
    as `invalid` or `stale`; doorbells `rung`; session messages that were `malformed`.
    """

    clients: int
    attached: int
    refused: int
    lost: int
    evicted: int
    received: int
    outstanding: int
    published: int
    dropped: int
    invalid: int
    stale: int
    rung: int
    malformed: int
