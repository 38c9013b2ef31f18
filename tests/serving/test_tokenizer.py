"""Tests that the tokenizer agrees with transformers', including template and special tokens."""

import json
from pathlib import Path

import pytest

from runtime.errors import InvalidRequest, ModelError
from runtime.serving.messages import Message
from runtime.serving.model.tokenizer import Tokenizer

MESSAGES = [
    Message("system", "Be brief."),
    Message("user", "Größe?\n"),
    Message("assistant", "1 m"),
    Message("user", "🙂"),
]


@pytest.fixture
def tokenizer(tiny_directory: Path) -> Tokenizer:
    return Tokenizer.load(tiny_directory)


@pytest.fixture
def copied(tiny_directory: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_directory / name).read_bytes())
    return tmp_path


def test_text_round_trips(tokenizer: Tokenizer) -> None:
    text = "Übung  macht\tden Meister 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_special_tokens_are_one_token_each_and_decode_to_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.prompt("<|im_start|>a<|im_end|>") == [1, tokenizer.encode("a")[0], 2]
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2]) == "a"


def test_chat_and_encode_agree_with_transformers(tokenizer: Tokenizer, tiny_directory: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the model needs the extra [llm]")
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_directory)
    turns = [{"role": message.role, "content": message.content} for message in MESSAGES]
    assert tokenizer.chat(MESSAGES) == theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert tokenizer.prompt("a b\n") == theirs("a b\n").input_ids
    assert tokenizer.eos_ids == {theirs.eos_token_id}
    assert tokenizer.vocabulary == len(theirs)


def test_several_end_tokens_are_supported_and_the_generation_config_has_precedence(copied: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert Tokenizer.load(copied).eos_ids == {0, 2}
    (copied / "generation_config.json").unlink()
    assert Tokenizer.load(copied).eos_ids == {2}


def test_a_template_file_has_precedence_over_the_config_and_sees_the_special_tokens(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.load(copied)
    assert tokenizer.chat([Message("user", "hi")]) == [1, *tokenizer.encode("hi")]


def test_messages_that_the_template_rejects_are_an_invalid_request(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Tokenizer.load(copied).chat(MESSAGES)


def test_a_template_cannot_escape_its_sandbox(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="rejects"):
        Tokenizer.load(copied).chat(MESSAGES)


def test_a_model_without_a_template_supports_only_prompts(copied: Path) -> None:
    (copied / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(copied)
    assert tokenizer.encode("a")
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.chat(MESSAGES)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"])
def test_a_damaged_file_is_named(copied: Path, name: str) -> None:
    (copied / name).write_text("{% if")
    with pytest.raises(ModelError, match=name if name.endswith("json") else "chat template"):
        Tokenizer.load(copied)
