"""An embedder behind a URL: requests, retries and invalid answers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import ConfigError, EmbedderFailed, EmbedderUnreachable
from runtime.retrieval.embedding.embedder import ServerSpec
from runtime.retrieval.embedding.loading import EmbedderLocation, check_embedder, choose_embedder, load_embedder
from runtime.retrieval.embedding.server import (
    BATCH_TEXTS,
    BUILD_RETRIES,
    REQUEST_RETRIES,
    RetryPolicy,
    ServerEmbedder,
)
from tests.retrieval.embedding_server import EmbeddingServer, embedding_server


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with embedding_server() as stand:
        yield stand


class Slept:
    """An embedder whose back-off waits are recorded."""

    def __init__(self, server: EmbeddingServer, retries: RetryPolicy = BUILD_RETRIES, **spec: Any) -> None:
        self.waits: list[float] = []
        described = ServerSpec(name="words", dim=spec.pop("dim", 4), url=server.url, **spec)
        self.embedder = ServerEmbedder(described, sleep=self.waits.append, jitter=random.Random(1), retries=retries)


def test_texts_are_sent_in_batches_and_vectors_return_in_order(server: EmbeddingServer) -> None:
    texts = ["x" * n for n in range(1, BATCH_TEXTS + 8)]
    vectors = Slept(server).embedder.embed(texts, "passage")
    assert [len(body["input"]) for body in server.asked] == [BATCH_TEXTS, 7]
    assert {(body["model"], body["encoding_format"]) for body in server.asked} == {("words", "float")}
    np.testing.assert_allclose(vectors[:, 0] / vectors[:, 1], range(1, BATCH_TEXTS + 8), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_retry_after_is_respected(server: EmbeddingServer) -> None:
    server.script = [(429, {"Retry-After": "7"}, {}), (503, {}, {}), (500, {"Retry-After": "soon"}, {})]
    slept = Slept(server)
    assert slept.embedder.embed(["cat"], "passage").shape == (1, 4)
    assert slept.waits[0] == 7
    assert all(0.5 * 2**n * 0.5 <= wait <= 0.5 * 2**n * 1.5 for n, wait in enumerate(slept.waits[1:], 1))
    assert len(server.asked) == 4


@pytest.mark.parametrize(("retries", "attempts"), [(REQUEST_RETRIES, 2), (BUILD_RETRIES, 6)])
def test_retries_are_bounded_and_the_error_has_the_reason(
    server: EmbeddingServer, retries: RetryPolicy, attempts: int
) -> None:
    server.script = [(503, {}, {"error": {"message": "too many texts"}})] * 9
    with pytest.raises(EmbedderUnreachable, match="responded with 503: too many texts"):
        Slept(server, retries).embedder.embed(["cat"])
    assert len(server.asked) == attempts


def test_a_long_retry_after_is_an_error_at_once(server: EmbeddingServer) -> None:
    server.script = [(429, {"Retry-After": "3600"}, {})]
    slept = Slept(server)
    with pytest.raises(EmbedderUnreachable, match="429"):
        slept.embedder.embed(["cat"], "passage")
    assert slept.waits == []


def test_a_connection_failure_is_an_unreachable_error(server: EmbeddingServer) -> None:
    gone = ServerSpec(name="words", dim=4, url="http://127.0.0.1:9/v1")
    with pytest.raises(EmbedderUnreachable, match=r"http://127.0.0.1:9/v1 does not answer"):
        ServerEmbedder(gone, sleep=lambda wait: None).embed(["cat"])


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (401, {"error": {"message": "no such key"}}, "responded with 401: no such key"),
        (400, "short", "responded with 400"),
        (200, {"data": []}, "0 vectors for 1 texts"),
        (200, {"data": [{"index": 1, "embedding": [1, 2, 3, 4]}]}, "or wrong indexes"),
        (200, {"data": [{"index": 0, "embedding": [1, 2, 3]}]}, "3 dimensions, the collection's have 4"),
        (200, {"data": [{"index": 0, "embedding": [1, 2, 3, 1e300]}]}, "beyond float32"),
        (200, {"data": [{"index": 0, "embedding": "AAAA"}]}, "not a list of embeddings"),
        (200, ["x" * 99_999], "more than"),
    ],
)
def test_an_invalid_answer_is_an_error_at_once(server: EmbeddingServer, status: int, answer: Any, message: str) -> None:
    server.script = [(status, {}, answer)]
    with pytest.raises(EmbedderFailed, match=message):
        Slept(server).embedder.embed(["cat"])
    assert len(server.asked) == 1


def test_a_new_collection_probes_the_dimension_with_the_key_of_a_file(server: EmbeddingServer, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-secret\nsecond line\n")
    spec, embedder = choose_embedder(server.url + "/", model="words", key_file=str(tmp_path / "key"))
    assert spec == ServerSpec(name="words", dim=4, url=server.url)
    embedder.embed(["cat"])
    again = load_embedder(spec, location=EmbedderLocation(key_file=str(tmp_path / "key")))
    again.embed(["cat"])
    assert server.keys == ["Bearer sk-secret"] * 3
    assert again.name == embedder.name


def test_the_configured_url_overrides_the_collections(server: EmbeddingServer) -> None:
    spec = ServerSpec(name="words", dim=4, url="http://127.0.0.1:9/v1")
    load_embedder(spec, location=EmbedderLocation(server.url)).embed(["cat"])
    assert server.texts == ["cat"]


def test_errors_about_a_key_do_not_show_it(tmp_path: Path) -> None:
    spec = ServerSpec(name="words", dim=4, url="http://127.0.0.1:9/v1")
    (tmp_path / "key").write_text("sk-secrét\n")
    for file, message in (("none", "cannot be read"), ("key", "its first line is not printable ASCII")):
        with pytest.raises(ConfigError, match=message) as raised:
            check_embedder(spec, EmbedderLocation(key_file=str(tmp_path / file)))
        assert "secr" not in raised.value.message


@pytest.mark.parametrize("url", ["http://", "http://user:pass@host/v1", "http://host/v1?x=1"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid server URL"):
        choose_embedder(url, model="m")


def test_a_server_without_a_models_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires the name of the embedder"):
        choose_embedder("http://127.0.0.1:9/v1")
