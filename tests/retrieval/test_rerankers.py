"""Rerankers: a cross-encoder in ONNX form against a plain computation, and servers, also faulty ones."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    RerankerFailed,
    RerankerUnreachable,
    TrinityError,
)
from runtime.node.retrieval_config import RerankSection
from runtime.retrieval.embedding.model_directory import read_model_directory
from runtime.retrieval.reranking.cross_encoder import CrossEncoder
from runtime.retrieval.reranking.reranker import Reranker, Scored, check_reranker
from runtime.retrieval.reranking.server import RerankServer
from tests.retrieval.model_server import serving
from tests.retrieval.rerank_server import RerankModel, hang_up
from tests.retrieval.tiny_model import WORDS, relevance, write_tiny_cross_encoder

NEVER = 1 << 62


def scores(reranker: Reranker, query: str, texts: Sequence[str], until_ns: int = NEVER) -> list[float]:
    found = [float("nan")] * len(texts)
    for batch in reranker.batches(query, texts):
        for row, score in zip(batch.rows, batch.score(until_ns).scores, strict=True):
            found[row] = score
    return found


# ---- cross-encoders


def cross_encoder(directory: Path, **options: Any) -> CrossEncoder:
    return CrossEncoder(read_model_directory(write_tiny_cross_encoder(directory, **options)))


def test_a_cross_encoder_scores_each_text_with_its_query_as_a_plain_computation_does(tmp_path: Path) -> None:
    # An even number of tokens besides the marks: which side an odd one is taken from, where both are long, is open.
    reranker = cross_encoder(tmp_path / "tiny", max_tokens=13)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    tokenizer.enable_truncation(13)
    random = np.random.default_rng(1)
    texts = [" ".join(random.choice(WORDS[3:], length)) for length in random.integers(0, 40, 60)]
    for query in ("cat sleeps", "dog", " ".join(WORDS[3:] * 5)):
        pairs = [tokenizer.encode(query, text) for text in texts]
        assert max(len(pair.ids) for pair in pairs) == 13
        expected = [relevance(pair.ids, pair.type_ids) for pair in pairs]
        np.testing.assert_allclose(scores(reranker, query, texts), expected, atol=1e-6)
    assert reranker.name == "tiny"


def test_texts_are_batched_by_length_and_their_tokens_counted(tmp_path: Path) -> None:
    batches = cross_encoder(tmp_path / "tiny", max_tokens=400).batches(
        "cat", ["dog " * 200, "dog", "dog " * 190, "cat"]
    )
    assert [sorted(batch.rows) for batch in batches] == [[1, 3], [2], [0]]
    assert [batch.score(0).tokens for batch in batches] == [10, 194, 204]


def test_an_empty_text_has_a_score_and_invalid_unicode_is_refused(tmp_path: Path) -> None:
    reranker = cross_encoder(tmp_path / "tiny")
    assert 0 < scores(reranker, "cat", [""])[0] < 0.5
    for query, text in (("\ud800", "cat"), ("cat", "\ud800")):
        with pytest.raises(InvalidRequest, match="unpaired surrogate"):
            reranker.batches(query, [text])


@pytest.mark.parametrize(
    ("options", "message"), [({"labels": 2}, r"shape \[1, 2\], not one logit"), ({"bias": float("nan")}, "not finite")]
)
def test_a_model_that_is_no_cross_encoder_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cross_encoder(tmp_path / "tiny", **options)


def test_a_missing_model_or_key_is_found_without_loading(tmp_path: Path) -> None:
    check_reranker(RerankSection())
    check_reranker(RerankSection(str(write_tiny_cross_encoder(tmp_path / "tiny"))))
    with pytest.raises(ConfigError, match=r"rerank.model: there is no directory of a model at .*none"):
        check_reranker(RerankSection(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="the reranker's key cannot be read"):
        check_reranker(RerankSection("m", "http://127.0.0.1:1/v1", str(tmp_path / "key")))


# ---- servers


@pytest.fixture
def server() -> Iterator[RerankModel]:
    with serving(RerankModel()) as found:
        yield found


def test_a_server_is_sent_the_texts_and_its_results_are_put_in_order(server: RerankModel) -> None:
    reranker = RerankServer("bge", server.url + "/", "secret")
    (batch,) = reranker.batches("q", ["aa", "", "aaaa"])
    assert batch.score(NEVER) == Scored([0.25, 0.125, 0.5], 7)
    assert server.asked == [{"model": "bge", "query": "q", "documents": ["aa", " ", "aaaa"], "top_n": 3}]
    assert server.keys == ["Bearer secret"]


def test_a_request_is_repeated_over_a_new_connection_if_the_server_has_closed_an_idle_one(
    server: RerankModel,
) -> None:
    reranker = RerankServer("bge", server.url)
    server.script = [hang_up]
    assert scores(reranker, "q", ["aa"]) == [0.25]
    server.script = [hang_up, hang_up]
    with pytest.raises(RerankerUnreachable, match="does not answer"):
        scores(reranker, "q", ["aa"])


def results(*found: tuple[Any, Any]) -> dict[str, Any]:
    return {"results": [{"index": index, "relevance_score": score} for index, score in found]}


@pytest.mark.parametrize(
    ("status", "content", "error", "message"),
    [
        (503, "full", RerankerUnreachable, "responded with 503: .*full"),
        (429, "", RerankerUnreachable, "429"),
        (400, "no", RerankerFailed, "responded with 400"),
        (302, "", RerankerFailed, "responded with 302"),
        (200, b"\xff", RerankerFailed, "not a list of results"),
        (200, {"data": []}, RerankerFailed, "not a list of results"),
        (200, results((0, 0.5)), RerankerFailed, "1 results for 2 texts"),
        (200, results((0, 0.5), (0, 0.5)), RerankerFailed, "wrong indexes"),
        (200, results((0, 0.5), (2, 0.5)), RerankerFailed, "wrong indexes"),
        (200, results((0, 0.5), (1, 0.5), (1, 0.6)), RerankerFailed, "3 results"),
        (200, results((0, 0.5), (1, "high")), RerankerFailed, "not a list of results"),
        (200, b'{"results": [{"index": 0, "relevance_score": 1e999}]}', RerankerFailed, "."),
        (200, b" " * 100_000, RerankerFailed, "more than"),
    ],
)
def test_a_faulty_response_is_an_error(
    server: RerankModel, status: int, content: Any, error: type[TrinityError], message: str
) -> None:
    server.script = [(status, {}, content)]
    with pytest.raises(error, match=message):
        scores(RerankServer("bge", server.url), "q", ["a", "b"])


def test_a_server_that_hangs_or_drips_is_left_in_time(server: RerankModel) -> None:
    for answer in (server.hang, server.drip):
        server.script = [answer]
        with pytest.raises(DeadlineExceeded, match="in time"):
            scores(RerankServer("bge", server.url), "q", ["a"], time.monotonic_ns() + 50_000_000)


def test_a_server_that_is_down_is_unreachable() -> None:
    with serving(RerankModel()) as server:
        url = server.url
    with pytest.raises(RerankerUnreachable, match="does not answer"):
        scores(RerankServer("bge", url), "q", ["a"])
