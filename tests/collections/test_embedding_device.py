"""`--device` of the commands that embed documents: on the GPU where that is possible, else a line says why."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from launchers.commands.embedding_device import Device, load_on
from launchers.main import command_line
from runtime.errors import CollectionError, ModelError, ResourceBusy, TrinityError
from runtime.retrieval.embedding.onnx_model import OnnxEncoder
from tests.integrations.databases import FakeDatabase
from tests.retrieval.tiny_bert import write_tiny_bert


class Loads:
    """Loads of an embedder: the devices that were asked for, of which the GPU fails with `error`."""

    def __init__(self, error: TrinityError | None = None) -> None:
        self.devices: list[str] = []
        self._error = error

    def __call__(self, device: str) -> str:
        self.devices.append(device)
        if device != "cpu" and self._error is not None:
            raise self._error
        return f"an embedder on {device}"


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("cuda", "cuda:0")])
def test_an_embedder_is_loaded_once_for_its_device(
    device: Device, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = Loads()
    assert load_on(device, loads) == f"an embedder on {name}"
    assert (loads.devices, capsys.readouterr().err) == ([name], "")


@pytest.mark.parametrize("error", [ModelError("it has no form for one"), ResourceBusy("the GPU is full")])
def test_an_embedder_that_a_gpu_cannot_run_is_loaded_on_the_cpu_and_a_line_says_why(
    error: TrinityError, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = Loads(error)
    assert load_on("cuda", loads) == "an embedder on cpu"
    assert loads.devices == ["cuda:0", "cpu"]
    assert capsys.readouterr().err == f"texts are embedded on the CPU: {error.message}\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPUs of the embedders that are made, which embed by the model's form for CPUs."""
    made: list[str] = []

    def encoder(files: Any, tokenizer: Path, pooling: Any, _: int, device: str) -> OnnxEncoder:
        made.append(device)
        return OnnxEncoder("m", files.directory / "onnx/model.onnx", tokenizer, pooling)

    module = SimpleNamespace(TorchEncoder=encoder)
    monkeypatch.setitem(sys.modules, "runtime.retrieval.embedding.torch_encoder", module)
    monkeypatch.setattr("runtime.retrieval.embedding.bert_files.torch_cuda", lambda: "13.0")
    return made


def run(*arguments: object) -> str:
    done = CliRunner().invoke(command_line(), [str(argument) for argument in arguments], catch_exceptions=False)
    return done.output


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """An empty collection, whose embedder has a form for GPUs."""
    run("index", "build", "--out", tmp_path / "docs", "--embedder", write_tiny_bert(tmp_path / "m"))
    return tmp_path / "docs"


def lines(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": str(n), "text": f"cat {n}"}) + "\n" for n in range(count)))
    return path


def test_documents_are_upserted_with_vectors_of_the_gpu(tmp_path: Path, docs: Path, gpus: list[str]) -> None:
    file = lines(tmp_path / "a.jsonl", 2)
    run("index", "upsert", docs, file)
    assert gpus == []
    assert run("index", "upsert", docs, file, "--device", "cuda").startswith("2 documents stored")
    assert gpus == ["cuda:0"]


def test_an_update_embeds_and_builds_the_graph_on_the_gpu(
    tmp_path: Path, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuvs.neighbors.cagra", None)
    file, out = tmp_path / "a.jsonl", tmp_path / "docs"
    build = ("--embedder", write_tiny_bert(tmp_path / "m"), "--degree", 2, "--threads", 1)
    run("index", "build", lines(file, 4), "--out", out, *build)
    assert "5 passages embedded" in run("index", "add", lines(file, 9), "--out", out, "--threads", 1)
    assert gpus == []
    with pytest.raises(CollectionError, match="needs cuVS"):
        run("index", "add", lines(file, 12), "--out", out, "--device", "cuda")
    assert gpus == ["cuda:0"]


def test_points_that_are_followed_are_embedded_on_the_gpu(
    docs: Path, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = FakeDatabase()
    database.put(1, (0.0, 1.0, 0.0), text="one")
    monkeypatch.setattr("launchers.commands.follow._source", lambda *_: database)
    follow = ("index", "follow", "qdrant", docs, "--url", "there", "--collection", "a", "--once", "--embed")
    assert "1 stored" in run(*follow, "--device", "cuda")
    assert gpus == ["cuda:0"]
