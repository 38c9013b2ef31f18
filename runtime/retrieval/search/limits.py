"""How long, and how many, a client of the pools has wait."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """`retry_ns`: a lost pool is tried again this often. `wait_ns`: a query without a deadline waits so long for one,
    while none of its collection is answered. `parked`: so many queries wait for a pool at once."""

    retry_ns: int = 500_000_000
    wait_ns: int = 10_000_000_000
    parked: int = 1024
