"""Tokenizer of a model, from its directory's `tokenizer.json`. Needs neither torch nor transformers.

Text of users never becomes a control token: `<|im_end|>` in a message or a passage is encoded as ordinary tokens for
these ten characters. Only markers of the chat template itself, and markers in a raw prompt, become control tokens.
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
from runtime.files import check_regular, read_regular
from runtime.serving.messages import Message

_MAX_FILE_BYTES = 256 << 20


class Tokenizer:
    """A model's tokenizer and chat template. Not thread-safe."""

    def __init__(
        self,
        tokens: tokenizers.Tokenizer,
        template: str | None,
        special: dict[str, str],
        eos_ids: frozenset[int],
    ) -> None:
        """Use `load`. `special` contains the template variables such as `bos_token` and `eos_token`."""
        tokens.encode_special_tokens = True  # markers in text are ordinary text
        self._tokens = tokens
        self._template = _environment().from_string(template) if template else None
        self._special = special
        added = tokens.get_added_tokens_decoder().items()
        self._control = {token.content: number for number, token in added if token.special}
        longest_first = sorted(map(re.escape, self._control), key=len, reverse=True)
        self._marker = re.compile("|".join(longest_first) or "(?!)")
        self._escape = _escape_table(self._control)
        self._unescape = {ord(stand_in): code for code, stand_in in self._escape.items()}
        unknown = getattr(tokens.model, "unk_token", None)  # replaces unknown characters, so it is not a marker
        self._control_ids = frozenset(number for content, number in self._control.items() if content != unknown)
        self._prefix, self._suffix = self._affixes()
        self.eos_ids = eos_ids
        self.vocabulary: int = tokens.get_vocab_size()

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` or `config.json`.

        Raises `ModelError` when a file is missing or damaged.
        """
        try:
            path = check_regular(directory / "tokenizer.json", _MAX_FILE_BYTES)
            tokens = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"cannot read {directory / 'tokenizer.json'}: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        template = config.get("chat_template")
        if (path := directory / "chat_template.jinja").is_file():
            template = _read(path).decode(errors="replace")
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
        """Return the token ids of `text` without control tokens; characters that are control tokens are dropped."""
        pieces = [text]
        while True:
            encodings = [self._tokens.encode(piece, add_special_tokens=False) for piece in pieces]
            splits = [self._split_markers(piece, encoding) for piece, encoding in zip(pieces, encodings, strict=True)]
            if all(parts is None for parts in splits):
                return [token for encoding in encodings for token in encoding.ids]
            pieces = [part for piece, parts in zip(pieces, splits, strict=True) for part in parts or [piece]]

    def prompt(self, text: str, before: str = "") -> list[int]:
        """Return the token ids of a raw prompt, with the tokenizer's own prefix and suffix tokens.

        Markers in `text` become control tokens, because clients render their own templates into raw prompts. `before`
        is prepended as plain text.
        """
        ordinary = self._marker.search(before) is None
        return [
            *self._prefix,
            *self._render(before + text, before.translate(self._escape) + text, ordinary),
            *self._suffix,
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens. Incomplete characters become U+FFFD."""
        text: str = self._tokens.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Iterable[Message]) -> list[int]:
        """Return the token ids of a conversation in the model's chat template, up to the start of the answer.

        Raises `InvalidRequest` if the model has no template or the template rejects the messages.
        """
        contents = [message.content for message in messages]
        roles = [message.role for message in messages]
        ordinary = not any(map(self._marker.search, contents))
        escaped = self._apply_template(roles, [content.translate(self._escape) for content in contents])
        return self._render(self._apply_template(roles, contents), escaped, ordinary)

    def _apply_template(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send a prompt instead of messages", "messages")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template rejects the messages: {error}", "messages") from error

    def _render(self, text: str, escaped: str, ordinary: bool) -> list[int]:
        """Return the token ids of `text`. Its markers become control tokens if `escaped` contains them too.

        `escaped` is the same text with the user's parts escaped; `ordinary` means that these parts contain no marker.
        If they form none with the surrounding text either, the text is tokenized in one piece, as transformers does.
        """
        markers = self._marker.findall(escaped)
        if ordinary and self._marker.findall(text) == markers:
            whole = self._parsed(text)
            # Some tokenizers match markers in normalized text, which can contain more of them.
            named = [self._control[name] for name in markers]
            if [token for token in whole if token in self._control_ids] == [
                token for token in named if token in self._control_ids
            ]:
                return whole
        tokens: list[int] = []
        at = 0
        for marker in self._marker.finditer(escaped):
            tokens += self.encode(escaped[at : marker.start()].translate(self._unescape))
            tokens.append(self._control[marker.group()])
            at = marker.end()
        return tokens + self.encode(escaped[at:].translate(self._unescape))

    def _parsed(self, text: str) -> list[int]:
        """Return the token ids of a text with all its markers as control tokens."""
        self._tokens.encode_special_tokens = False
        try:
            ids: list[int] = self._tokens.encode(text, add_special_tokens=False).ids
            return ids
        finally:
            self._tokens.encode_special_tokens = True

    def _split_markers(self, text: str, encoding: tokenizers.Encoding) -> list[str] | None:
        """Return `text` split inside every control token of its encoding; None if there is none."""
        if self._control_ids.isdisjoint(encoding.ids):
            return None
        parts: list[str] = []
        at = 0
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._control_ids:
                parts.append(text[at : begin + 1] if end - begin > 1 else text[at:begin])
                at = begin + 1
        return [*parts, text[at:]]

    def _affixes(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer adds before and after a text."""
        encoding = self._tokens.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        begin = added.index(0) if 0 in added else len(added)
        end = added[::-1].index(0) if 0 in added else 0
        return encoding.ids[:begin], encoding.ids[len(added) - end :]


def _escape_table(markers: Iterable[str]) -> dict[int, str]:
    """Return a reversible table of single-character replacements after which a text contains no marker.

    The replacements are surrogates, which never occur in text. White space stays, because templates strip it.
    """
    used = sorted({character for marker in markers for character in marker if not character.isspace()})
    return {ord(character): chr(0xD800 + number) for number, character in enumerate(used)}


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a jinja environment with transformers' settings, sandboxed because chat templates are untrusted."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment


def _content(token: Any) -> str:
    """Return a special token's text: `tokenizer_config.json` contains a string or an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty if the file does not exist."""
    try:
        value = json.loads(_read(path)) if path.exists() else {}
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
