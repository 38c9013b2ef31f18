"""A sentence-transformers model of a few hundred bytes: an embedding table of ten words. And a cross-encoder as small.

Written without the package `onnx`: the file is Protocol Buffers, of which six messages are needed (onnx.proto3).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("[UNK]", "[CLS]", "[SEP]", "query:", "passage:", "cat", "dog", "rates", "rise", "sleeps")
_INT64, _FLOAT = 7, 1


def table() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the words' vectors, float32 [10, 6]."""
    return np.random.default_rng(5).normal(size=(len(WORDS), 6)).astype(np.float32)


def ids(text: str) -> list[int]:
    """Return a text's token ids with special tokens, as the model's tokenizer does."""
    return [1, *(WORDS.index(word) if word in WORDS else 0 for word in text.split()), 2]


def write_tiny_model(
    directory: Path,
    *,
    pooling: dict[str, Any] | None = None,
    modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    max_tokens: int = 16,
    prompts: dict[str, str] | None = None,
    inputs: tuple[str, ...] = ("input_ids", "attention_mask"),
    model_file: str = "onnx/model.onnx",
) -> Path:
    """Write the model directory. `pooling`: the content of 1_Pooling/config.json, by default mean."""
    (directory / model_file).parent.mkdir(parents=True, exist_ok=True)
    (directory / model_file).write_bytes(_model(inputs))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.save(str(directory / "tokenizer.json"))
    listed = [
        {"idx": n, "name": str(n), "type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}" if n else ""}
        for n, kind in enumerate(modules)
    ]
    files: dict[str, Any] = {
        "modules.json": listed,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True} if pooling is None else pooling,
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
    }
    if prompts is not None:
        files["config_sentence_transformers.json"] = {"prompts": prompts, "default_prompt_name": None}
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


def _model(inputs: tuple[str, ...]) -> bytes:
    """Return a graph with one Gather by `input_ids`; other inputs are unused."""
    tensor = _tensor("table", table())
    node = _bytes(1, b"table") + _bytes(1, b"input_ids") + _bytes(2, b"last_hidden_state") + _bytes(4, b"Gather")
    given = b"".join(_bytes(11, _value(name, _INT64, 2)) for name in inputs)
    graph = _bytes(1, node) + _bytes(2, b"tiny") + _bytes(5, tensor) + given
    graph += _bytes(12, _value("last_hidden_state", _FLOAT, 3))
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _number(2, 17))


# ---- a cross-encoder: the more words a text shares with its query, the more relevant it is


def word_weights() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what two words count for each other, as vectors float32 [10, 10] to be multiplied."""
    noise = np.random.default_rng(6).normal(size=(len(WORDS), len(WORDS)))
    return (np.eye(len(WORDS)) + 0.05 * noise).astype(np.float32)


def relevance(pair: Sequence[int], types: Sequence[int]) -> float:
    """Return the score of the tokens of a pair, as the model computes it."""
    vectors, second = word_weights()[list(pair)], np.array(types)[:, None]
    logit = float(((vectors * (1 - second)).sum(axis=0) * (vectors * second).sum(axis=0)).sum()) - 2.0
    return 1.0 / (1.0 + float(np.exp(-logit)))


def write_tiny_cross_encoder(directory: Path, *, max_tokens: int = 32, labels: int = 1, bias: float = -2.0) -> Path:
    """Write the model directory. `labels`: logits of a pair; `bias` is added to each."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.onnx").write_bytes(_cross_encoder(labels, bias))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": max_tokens}))
    return directory


def _cross_encoder(labels: int, bias: float) -> bytes:
    """Return a graph: logits = Σ (Σ query's vectors · Σ text's vectors) + bias."""
    nodes = (
        ("Gather", ("weights", "input_ids"), "vectors"),  # [rows, tokens, 10]
        ("Cast", ("attention_mask",), "mask"),
        ("Cast", ("token_type_ids",), "types"),
        ("Mul", ("types", "mask"), "second"),
        ("Sub", ("mask", "second"), "first"),
        ("Unsqueeze", ("first", "one"), "first_row"),
        ("Unsqueeze", ("second", "one"), "second_row"),
        ("MatMul", ("first_row", "vectors"), "query"),  # [rows, 1, 10]
        ("MatMul", ("second_row", "vectors"), "text"),
        ("Mul", ("query", "text"), "products"),
        ("MatMul", ("products", "sum"), "summed"),  # [rows, 1, labels]
        ("Squeeze", ("summed", "one"), "squeezed"),
        ("Add", ("squeezed", "bias"), "logits"),
    )
    graph = _bytes(2, b"tiny")
    for kind, inputs, output in nodes:
        node = b"".join(_bytes(1, name.encode()) for name in inputs) + _bytes(2, output.encode())
        node += _bytes(4, kind.encode())
        if kind == "Cast":
            node += _bytes(5, _bytes(1, b"to") + _number(3, _FLOAT) + _number(20, 2))
        graph += _bytes(1, node)
    graph += _bytes(5, _tensor("weights", word_weights())) + _bytes(5, _tensor("one", np.array([1], np.int64)))
    graph += _bytes(5, _tensor("sum", np.ones((len(WORDS), labels), np.float32)))
    graph += _bytes(5, _tensor("bias", np.array([bias], np.float32)))
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        graph += _bytes(11, _value(name, _INT64, 2))
    graph += _bytes(12, _value("logits", _FLOAT, 2))
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _number(2, 17))


def _tensor(name: str, values: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    kind = _INT64 if values.dtype == np.int64 else _FLOAT
    return _numbers(1, *values.shape) + _number(2, kind) + _bytes(8, name.encode()) + _bytes(9, values.tobytes())


def _value(name: str, kind: int, axes: int) -> bytes:
    shape = b"".join(_bytes(1, _bytes(2, f"axis{axis}".encode())) for axis in range(axes))
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _number(1, kind) + _bytes(2, shape)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _numbers(field: int, *values: int) -> bytes:
    return b"".join(_number(field, value) for value in values)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
