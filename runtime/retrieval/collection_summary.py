"""Size and properties of a collection, as reported to clients."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectionSummary:
    """A collection's size and properties. `is_open`: its documents are open in this process.

    `created_at`: time of the build, Unix time in seconds.
    """

    is_open: bool = False
    size: int = 0
    document_bytes: int = 0
    created_at: int = 0
    dim: int = 0
    metric: str = ""
    embedder: str = ""
