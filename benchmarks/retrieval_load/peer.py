"""Qdrant's client with fastembed, in this process: the same model file, passages and questions, without HTTP."""

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.retrieval_load.load import Load
from runtime.retrieval.embedding.embedder import Vectors
from runtime.retrieval.embedding.onnx_model import minilm_files

PEER_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def peer_model(directory: Path) -> Path:
    """Make a directory with our embedder's files as fastembed expects them."""
    model, tokenizer = minilm_files()
    directory.mkdir(exist_ok=True)
    for file in (model, *tokenizer.parent.glob("*.json")):
        if not (directory / file.name).exists():
            (directory / file.name).symlink_to(file)
    return directory


def peer_name() -> str:
    """Return the name and versions of the peer; "" if it is not installed."""
    if find_spec("qdrant_client") is None or find_spec("fastembed") is None:
        return ""
    return f"qdrant-client {version('qdrant-client')} in memory, fastembed {version('fastembed')}"


class Peer:
    """A collection of the passages."""

    def __init__(self, texts: Sequence[str], vectors: Vectors, home: Path) -> None:
        from fastembed import TextEmbedding
        from qdrant_client import QdrantClient, models

        cores, directory = len(os.sched_getaffinity(0)), str(peer_model(home))
        self._model: Any = TextEmbedding(PEER_MODEL, threads=cores, specific_model_path=directory)
        self._client: Any = QdrantClient(":memory:")
        distance = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
        self._client.create_collection("docs", vectors_config=distance)
        points = [
            models.PointStruct(id=number, vector=vector.tolist(), payload={"text": text})
            for number, (text, vector) in enumerate(zip(texts, np.asarray(vectors), strict=True))
        ]
        self._client.upload_points("docs", points)
        self.ask("a first question")

    def ask(self, question: str) -> int:
        """Return the number of passages found."""
        (vector,) = self._model.query_embed(question)
        return len(self._client.query_points("docs", query=vector.tolist(), limit=5).points)

    def closed_loop(self, questions: Sequence[str], clients: int, seconds: float) -> Load:
        """Ask from `clients` threads for `seconds`."""
        load, lock, until = Load(length_s=seconds), threading.Lock(), time.perf_counter() + seconds
        unused: Iterator[str] = itertools.cycle(questions)

        def client() -> None:
            while (begin := time.perf_counter()) < until:
                with lock:
                    question = next(unused)
                answer = self.ask(question)
                now = time.perf_counter()
                with lock:
                    if now <= until:
                        load.add(200 if answer else 404, now - begin)
                    else:
                        load.after += 1

        running = [threading.Thread(target=client) for _ in range(clients)]
        for one in running:
            one.start()
        for one in running:
            one.join()
        return load
