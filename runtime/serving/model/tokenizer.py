"""Text to token ids and back, from a model directory's `tokenizer.json`; needs neither torch nor transformers.

A text never becomes a control token: whoever writes `<|im_end|>` into a message or a passage gets these ten characters
in ordinary tokens. Only the chat template's own markers, and those in a raw prompt, are the tokens that they name.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest, ModelError
from runtime.serving.messages import Message


class Tokenizer:
    """A model's tokenizer and chat template. Not for use by two threads at once."""

    def __init__(
        self,
        tokens: tokenizers.Tokenizer,
        template: str | None,
        special: dict[str, str],
        eos_ids: frozenset[int],
    ) -> None:
        """Use `load`. `special` holds the template's variables `bos_token`, `eos_token` and so on."""
        tokens.encode_special_tokens = True  # a marker in a text is text
        self._tokens = tokens
        self._template = _environment().from_string(template) if template else None
        self._special = special
        added = tokens.get_added_tokens_decoder().items()
        self._control = {token.content: number for number, token in added if token.special}
        longest_first = sorted(map(re.escape, self._control), key=len, reverse=True)
        self._marker = re.compile("|".join(longest_first) or "(?!)")
        self._seal = _seal(self._control)
        self._unseal = {ord(stand_in): code for code, stand_in in self._seal.items()}
        unknown = getattr(tokens.model, "unk_token", None)  # what no token is for becomes this one: no marker
        self._control_ids = frozenset(number for content, number in self._control.items() if content != unknown)
        self._begin, self._end = self._ends()
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

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, none of them a control token. What the vocabulary has as one alone is left out."""
        pieces = [text]
        while True:
            encodings = [self._tokens.encode(piece, add_special_tokens=False) for piece in pieces]
            cut = [self._cut(piece, encoding) for piece, encoding in zip(pieces, encodings, strict=True)]
            if all(parts is None for parts in cut):
                return [token for encoding in encodings for token in encoding.ids]
            pieces = [part for piece, parts in zip(pieces, cut, strict=True) for part in parts or [piece]]

    def prompt(self, text: str, before: str = "") -> list[int]:
        """Token ids of a raw prompt with the tokens that the model wants at its ends.

        Markers in `text` are the control tokens that they name: a raw prompt is where a client renders a template of
        its own. `before` is put in front of it and is text alone.
        """
        ordinary = self._marker.search(before) is None
        return [*self._begin, *self._render(before + text, before.translate(self._seal) + text, ordinary), *self._end]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens. Half characters become U+FFFD."""
        text: str = self._tokens.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the assistant answers.

        Raises `InvalidRequest` if the model has no template or the template refuses the messages.
        """
        contents = [message.content for message in messages]
        roles = [message.role for message in messages]
        ordinary = not any(map(self._marker.search, contents))
        sealed = self._turns(roles, [content.translate(self._seal) for content in contents])
        return self._render(self._turns(roles, contents), sealed, ordinary)

    def _turns(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send a prompt instead of messages", "messages")
        turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", "messages") from error

    def _render(self, text: str, sealed: str, ordinary: bool) -> list[int]:
        """Token ids of `text` with its markers as control tokens, except those that are not in `sealed`.

        `sealed` is the same text with others' parts sealed, `ordinary` whether these are known to hold no marker. If
        they do not make one with what is around them either, the text is tokenized in one piece, as transformers does.
        """
        markers = self._marker.findall(sealed)
        if ordinary and self._marker.findall(text) == markers:
            whole = self._parsed(text)
            # Some tokenizers look for markers in normalized text, where there can be more of them.
            named = [self._control[name] for name in markers]
            if [token for token in whole if token in self._control_ids] == [
                token for token in named if token in self._control_ids
            ]:
                return whole
        tokens: list[int] = []
        at = 0
        for marker in self._marker.finditer(sealed):
            tokens += self.encode(sealed[at : marker.start()].translate(self._unseal))
            tokens.append(self._control[marker.group()])
            at = marker.end()
        return tokens + self.encode(sealed[at:].translate(self._unseal))

    def _parsed(self, text: str) -> list[int]:
        """Token ids of a text whose markers all count."""
        self._tokens.encode_special_tokens = False
        try:
            ids: list[int] = self._tokens.encode(text, add_special_tokens=False).ids
            return ids
        finally:
            self._tokens.encode_special_tokens = True

    def _cut(self, text: str, encoding: tokenizers.Encoding) -> list[str] | None:
        """`text` cut in the middle of every marker that the vocabulary itself spells; None if there is none."""
        if self._control_ids.isdisjoint(encoding.ids):
            return None
        parts: list[str] = []
        at = 0
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._control_ids:
                parts.append(text[at : begin + 1] if end - begin > 1 else text[at:begin])
                at = begin + 1
        return [*parts, text[at:]]

    def _ends(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind a whole text."""
        encoding = self._tokens.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        begin = added.index(0) if 0 in added else len(added)
        end = added[::-1].index(0) if 0 in added else 0
        return encoding.ids[:begin], encoding.ids[len(added) - end :]


def _seal(markers: Iterable[str]) -> dict[int, str]:
    """What to replace in a text, so that no marker can come of it, character by character and so that it can be undone.

    The stand-ins are surrogates, which no text has. White space stays, for templates strip it.
    """
    used = sorted({character for marker in markers for character in marker if not character.isspace()})
    return {ord(character): chr(0xD800 + number) for number, character in enumerate(used)}


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
