"""Embedding of documents outside a node: builds, and writers on the command line."""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future

from runtime.retrieval.embedding.embedder import Embedder, Vectors
from runtime.retrieval.embedding.stage import Embedded, EmbeddingStage

_AHEAD = 2  # lists that wait: threads that run out of one begin the next
_STOP_S = 1.0  # of a batch that computes; a request that hangs ends with the process


def list_size(embedder: Embedder, threads: int) -> int:
    """Return how many texts a list should have, so that all threads, or all requests to a server, are busy."""
    return max(64 * max(threads, embedder.max_concurrency), 2 * embedder.turn.texts)


def embed_passages(embedder: Embedder, lists: Iterable[Sequence[str]], threads: int) -> Generator[Vectors, None, None]:
    """Yield the vectors [n, dim] of each list in order, embedded by a stage of `threads` threads, while the next lists
    are made. Raises what `EmbeddingStage.submit` and its futures raise."""
    stage = EmbeddingStage(threads)
    waiting: deque[Future[Embedded]] = deque()
    try:
        for texts in lists:
            waiting.append(stage.submit(embedder, texts, "passage"))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result().vectors
        while waiting:
            yield waiting.popleft().result().vectors
    finally:
        stage.close(_STOP_S)
