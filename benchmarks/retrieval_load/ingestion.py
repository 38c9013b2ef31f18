"""Embedding of documents as a build does it, beside the raw embedder and fastembed: the same texts, in alternation."""

import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.retrieval_load.peer import PEER_MODEL, peer_model
from benchmarks.retrieval_load.stage import Measured, measured, raw
from runtime.retrieval.embedding.bulk import embed_passages, list_size
from runtime.retrieval.embedding.embedder import Embedder

_BATCH = 64


def measure_ingestion(model: Embedder, texts: Sequence[str], rounds: int = 3) -> dict[str, list[Measured]]:
    """Return what each way of embedding took, by round."""
    cores = len(os.sched_getaffinity(0))
    ways: dict[str, Callable[[], Measured]] = {
        f"raw, batches of {_BATCH} on {cores} threads": lambda: raw(model, texts, cores, _BATCH, "passage"),
        "documents of a build": lambda: _build(model, texts, cores),
    }
    with tempfile.TemporaryDirectory() as place:
        if find_spec("fastembed") is not None:
            ways |= _fastembed(Path(place), texts, cores)
        results: dict[str, list[Measured]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, measure in ways.items():
                results[way].append(measure())
    return results


def _build(model: Embedder, texts: Sequence[str], threads: int) -> Measured:
    size = list_size(model, threads)
    lists = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
    return measured(lambda: list(embed_passages(model, lists, threads)), len(texts))


def _fastembed(directory: Path, texts: Sequence[str], cores: int) -> dict[str, Callable[[], Measured]]:
    """Return ways of embedding by fastembed, with the same model file on as many threads."""
    from fastembed import TextEmbedding

    peer: Any = TextEmbedding(PEER_MODEL, threads=cores, specific_model_path=str(peer_model(directory)))

    def way(batch: int) -> Callable[[], Measured]:
        return lambda: measured(lambda: list(peer.embed(list(texts), batch_size=batch)), len(texts))

    return {f"fastembed {version('fastembed')}, batches of {batch}": way(batch) for batch in (1, 16)}
