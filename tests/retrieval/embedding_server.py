"""A fake server of OpenAI's `/v1/embeddings`."""

from contextlib import AbstractContextManager
from typing import Any

from tests.retrieval.model_server import ModelServer, serving


class EmbeddingServer(ModelServer):
    """Embeds a text as [its length, 1, 0, …]."""

    path = "/v1/embeddings"

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.dim = dim

    @property
    def texts(self) -> list[str]:
        return [text for body in self.asked for text in body["input"]]

    def vector(self, text: str) -> list[float]:
        return [float(len(text)), 1.0, *[0.0] * (self.dim - 2)]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": n, "embedding": self.vector(t)} for n, t in enumerate(body["input"])]
        return {"object": "list", "data": data[::-1], "model": body["model"]}


def embedding_server(dim: int = 4) -> AbstractContextManager[EmbeddingServer]:
    """Run a server on a loopback port."""
    return serving(EmbeddingServer(dim))
