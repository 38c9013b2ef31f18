"""Directory of a sentence-transformers model in ONNX form, as described by its own files.

onnx/model.onnx                      the network; or onnx/model*.onnx if there is one, or model.onnx
tokenizer.json                       how texts become tokens
modules.json                         what comes after the network: pooling, scaling
1_Pooling/config.json                which pooling
sentence_bert_config.json            how many tokens are read
config_sentence_transformers.json    prefixes ("prompts") of queries and passages
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.files import open_regular, read_regular
from runtime.retrieval.embedding.text_embedder import Encoding, Pooling

MAX_TOKENS = 2048
"""Upper limit whatever the model supports: the cost of attention is quadratic in the tokens."""
_MAX_JSON_BYTES = 4 << 20
_MAX_TOKENIZER_BYTES = 128 << 20
_SETTINGS = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "config.json")
_POOLINGS: dict[str, Pooling] = {  # names since version 5, and before
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
}
_QUERY_PROMPTS = ("query", "search_query", "s2p_query", "retrieval.query")
_PASSAGE_PROMPTS = ("document", "passage", "search_document", "corpus", "retrieval.passage")
# Models whose prefixes are documented in their README only: a pattern of their names, query and passage prefix.
_FAMILIES = (
    (r"\be5-(small|base|large)(-v2)?\b(?!-instruct)", "query: ", "passage: "),
    (r"\bbge-(small|base|large)-en\b", "Represent this sentence for searching relevant passages: ", ""),
    (r"\bbge-(small|base|large)-zh\b", "为这个句子生成表示以用于检索相关文章：", ""),
    (r"\bnomic-embed-text\b", "search_query: ", "search_document: "),
)


@dataclass(frozen=True)
class ModelDirectory:
    """A model's files, relative to `directory`, and its encoding."""

    directory: Path
    name: str
    model_file: str
    files: tuple[str, ...]  # all files that are read
    encoding: Encoding

    def size_bytes(self) -> int:
        """Return the size of all files that are read."""
        return sum((self.directory / name).stat().st_size for name in self.files)

    def sha256(self) -> str:
        """Return the SHA-256 of all files that the vectors depend on. Raises `ModelError`."""
        digest = hashlib.sha256()
        for name in self.files:
            try:
                with open(open_regular(self.directory / name), "rb") as file:
                    digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
            except OSError as error:
                raise ModelError(f"{self.directory / name}: {error.strerror}") from error
        return digest.hexdigest()


def read_model_directory(path: Path) -> ModelDirectory:
    """Read a model directory, given by itself or by one of its .onnx files. Raises `ModelError`."""
    directory, model_file = _model_file(path)
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{directory} has no tokenizer.json")
    if tokenizer.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise ModelError(f"{tokenizer} has {tokenizer.stat().st_size:,} bytes, the limit is {_MAX_TOKENIZER_BYTES:,}")
    modules = _modules(directory)
    pooling_file = f"{modules['Pooling'] or '1_Pooling'}/config.json"
    pooling, whole = _pooling(directory, pooling_file)
    if "Dense" in modules:
        pooling = None  # only a graph that contains the layer can be used
    query_prefix, passage_prefix = _prefixes(directory)
    if not whole and (query_prefix or passage_prefix):
        raise ModelError(f"{directory / pooling_file}: include_prompt false is not supported")
    bert = _json(directory, "sentence_bert_config.json")
    encoding = Encoding(
        _max_tokens(directory, bert),
        pooling,
        scaled="Normalize" in modules,
        lower_case=bert.get("do_lower_case") is True,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )
    weights = sorted(p.relative_to(directory).as_posix() for p in (directory / model_file).parent.glob(
        f"{Path(model_file).name}[_.]data*"))  # fmt: skip
    settings = [name for name in (*_SETTINGS, pooling_file) if (directory / name).is_file()]
    files = (model_file, *weights, "tokenizer.json", *settings)
    return ModelDirectory(directory, _named(directory), model_file, files, encoding)


def _model_file(path: Path) -> tuple[Path, str]:
    """Return the directory and the model file in it."""
    if path.suffix == ".onnx":
        if not path.is_file():
            raise ModelError(f"there is no model at {path}")
        directory = path.parent.parent if path.parent.name == "onnx" else path.parent
        return directory.absolute(), path.relative_to(directory).as_posix()
    if not path.is_dir():
        raise ModelError(f"there is no directory of a model at {path}")
    for name in ("onnx/model.onnx", "model.onnx"):
        if (path / name).is_file():
            return path.absolute(), name
    models = sorted(path.glob("onnx/model*.onnx"))
    if not models:
        raise ModelError(f"{path} has no onnx/model.onnx: a model in ONNX form is needed")
    if len(models) > 1:
        raise ModelError(f"{path} has several models: specify one of {', '.join(str(one) for one in models)}")
    return path.absolute(), models[0].relative_to(path).as_posix()


def _modules(directory: Path) -> dict[str, str]:
    """Return the modules' folders by class name."""
    path = directory / "modules.json"
    listed = _read_json(path) if path.is_file() else [{"type": "Pooling", "path": "1_Pooling"}, {"type": "Normalize"}]
    modules = {"Pooling": ""}
    try:
        for module in listed:
            modules[str(module["type"]).rpartition(".")[2]] = str(module.get("path") or "")
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} is not a list of modules with types") from error
    if unknown := set(modules) - {"Transformer", "Pooling", "Normalize", "Dense"}:
        raise ModelError(f"{path}: the module {min(unknown)[:64]!r} is not supported")
    if not re.fullmatch(r"\w{0,32}", modules["Pooling"]):
        raise ModelError(f"{path}: {modules['Pooling'][:64]!r} is not a valid module folder")
    return modules


def _pooling(directory: Path, name: str) -> tuple[Pooling | None, bool]:
    """Return the configured pooling (None without a file), and whether prompts are pooled with their texts."""
    if not (directory / name).is_file():
        return None, True
    config = _json(directory, name)
    modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if isinstance(newer := config.get("pooling_mode"), str):
        modes = [newer]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{directory / name}: pooling {', '.join(modes)[:128] or 'none'} is not supported; supported are "
            "mean, cls and last token"
        )
    return _POOLINGS[modes[0]], config.get("include_prompt") is not False


def _max_tokens(directory: Path, bert: dict[str, Any]) -> int:
    tokenizer, network = _json(directory, "tokenizer_config.json"), _json(directory, "config.json")
    for given in (
        bert.get("max_seq_length"),
        tokenizer.get("model_max_length"),
        network.get("max_position_embeddings"),
    ):
        if isinstance(given, int | float) and not isinstance(given, bool) and 1 <= given < 1 << 30:
            return min(int(given), MAX_TOKENS)
    return 512


def _prefixes(directory: Path) -> tuple[str, str]:
    """Return the prefixes of queries and passages, from the model's files, else by its family."""
    config = _json(directory, "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str) and len(text) <= 1024 for text in prompts.values()
    ):
        raise ModelError(
            f"{directory / 'config_sentence_transformers.json'}: prompts must be strings of at most 1024 characters"
        )
    default = str(prompts.get(config.get("default_prompt_name"), ""))
    query = next((prompts[name] for name in _QUERY_PROMPTS if name in prompts), default)
    passage = next((prompts[name] for name in _PASSAGE_PROMPTS if name in prompts), default)
    if query or passage or any(name in prompts for name in (*_QUERY_PROMPTS, *_PASSAGE_PROMPTS)):
        return query, passage
    names = f"{_named(directory)} {str(_json(directory, 'config.json').get('_name_or_path', ''))[:256]}".lower()
    for family, of_query, of_passage in _FAMILIES:
        if re.search(family, names):
            return of_query, of_passage
    return "", ""


def _named(directory: Path) -> str:
    """Return the model's display name; in a hub's cache the directory name is a checksum."""
    parts = directory.resolve().parts
    hub = [part for part in parts[-3:] if part.startswith("models--")]
    return (hub[0].rpartition("--")[2] if hub else parts[-1])[:256] or "model"


def _json(directory: Path, name: str) -> dict[str, Any]:
    """Read a settings file; {} if there is none."""
    if not (directory / name).is_file():
        return {}
    content = _read_json(directory / name)
    if not isinstance(content, dict):
        raise ModelError(f"{directory / name} is not a JSON object")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, _MAX_JSON_BYTES))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
