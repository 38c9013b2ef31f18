"""Text to token ids and back, from a model directory's `tokenizer.json`; needs neither torch nor transformers."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest, ModelError
from runtime.serving.messages import Message


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(
        self,
        tokens: tokenizers.Tokenizer,
        template: str | None,
        special: dict[str, str],
        eos_ids: frozenset[int],
    ) -> None:
        """Use `load`. `special` holds the template's variables `bos_token`, `eos_token` and so on."""
        self._tokens = tokens
        self._template = _environment().from_string(template) if template else None
        self._special = special
        self._markers = sorted(
            (token.content for token in tokens.get_added_tokens_decoder().values() if token.special),
            key=len,
            reverse=True,
        )
        self.eos_ids = eos_ids
        self.vocabulary: int = tokens.get_vocab_size()

    @classmethod
    def load(cls, directory: Path) -> Self:
        """From `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` or `config.json`.

        Raises `ModelError` when a file is missing or damaged.
        """
        try:
            tokens = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"cannot read {directory / 'tokenizer.json'}: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        template = config.get("chat_template")
        if (path := directory / "chat_template.jinja").is_file():
            template = path.read_text(encoding="utf-8")
        special = {key: _content(value) for key, value in config.items() if key.endswith("_token") and value}
        eos = _read_json(directory / "generation_config.json").get("eos_token_id")
        if eos is None:
            eos = _read_json(directory / "config.json").get("eos_token_id")
        eos_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        try:
            return cls(tokens, template, special, eos_ids)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template in {directory} is not valid: {error}") from error

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; with `special` as a whole prompt, with the tokens the model wants at its ends."""
        ids: list[int] = self._tokens.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens. Half characters become U+FFFD."""
        text: str = self._tokens.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the assistant answers.

        Raises `InvalidRequest` if the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send a prompt instead of messages", "messages")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._template.render(messages=turns, add_generation_prompt=True, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", "messages") from error
        return self.encode(text)

    def plain(self, text: str) -> str:
        """`text` without the markers of special tokens: a document must not be able to end a turn of the chat."""
        while True:
            cleaned = text
            for marker in self._markers:
                cleaned = cleaned.replace(marker, "")
            if cleaned == text:  # removing one marker can bring the halves of another together
                return text
            text = cleaned


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: transformers' settings. Sandboxed: a template is data."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment


def _content(token: Any) -> str:
    """A special token's text, which `tokenizer_config.json` gives as a string or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
