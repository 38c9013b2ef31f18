"""What clients are told of a collection."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectionSummary:
    """What a collection is, as far as its documents are open here (`here`). `files`: that its documents were read from,
    or the documents where they were not. `created_at`: when it was built, in seconds of Unix time.
    """

    here: bool = False
    size: int = 0
    files: int = 0
    document_bytes: int = 0
    created_at: int = 0
    dim: int = 0
    metric: str = ""
    embedder: str = ""
