"""A sentence-transformers model of a few hundred bytes: an embedding table of ten words.

Written without the package `onnx`: the file is Protocol Buffers, of which six messages are needed (onnx.proto3).
"""

import json
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
    vectors = table()
    tensor = _numbers(1, *vectors.shape) + _number(2, _FLOAT) + _bytes(8, b"table") + _bytes(9, vectors.tobytes())
    node = _bytes(1, b"table") + _bytes(1, b"input_ids") + _bytes(2, b"last_hidden_state") + _bytes(4, b"Gather")
    given = b"".join(_bytes(11, _value(name, _INT64, 2)) for name in inputs)
    graph = _bytes(1, node) + _bytes(2, b"tiny") + _bytes(5, tensor) + given
    graph += _bytes(12, _value("last_hidden_state", _FLOAT, 3))
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _number(2, 17))


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
