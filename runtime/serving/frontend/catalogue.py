"""What the frontend knows of the node's collections beside searching them: what they are, and their embedders."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from runtime.errors import UnknownCollection, UnknownModel
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.library import About


class Catalogue(Protocol):
    """The node's collections and their embedders."""

    def about(self, collection: str) -> About:
        """Raises UnknownCollection."""

    def embedders(self) -> Mapping[str, Embedder]:
        """By the names that requests use."""

    def embedded(self, embedder: Embedder, texts: Sequence[str], kind: TextKind) -> Awaitable[tuple[Vectors, int]]:
        """The texts' vectors, and how many tokens they have. Raises TrinityError."""


class NoCatalogue:
    """Of a node without collections."""

    def about(self, collection: str) -> About:
        raise UnknownCollection("this node has no collections", "vector_store_id")

    def embedders(self) -> Mapping[str, Embedder]:
        return {}

    async def embedded(self, embedder: Embedder, texts: Sequence[str], kind: TextKind) -> tuple[Vectors, int]:
        raise UnknownModel("this node has no collections, and no embedder", "model")
