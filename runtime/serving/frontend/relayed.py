"""Pieces of an answer that another server writes: its choices go on as they came, with all that it put into them."""

from dataclasses import dataclass, field
from typing import Any

from runtime.serving.messages import Tokens

Json = dict[str, Any]

_GROWING = frozenset({"content", "text", "reasoning_content", "reasoning", "refusal", "arguments"})


class Relayed(Tokens, frozen=True, kw_only=True):
    """`choices` as the server wrote them, each with its `index` and a `delta` (a chat) or `text` (a completion).

    `text` and `token_ids` are those of the first choice, as far as they are known. The last piece's `finish_reason`
    says "length" if any choice ended so; the choices have their own. `usage` comes with the last piece, None if the
    server did not tell it; `completion_tokens` then counts what was seen.
    """

    choices: tuple[Json, ...] = ()
    usage: Json | None = None
    completion_tokens: int = 0


@dataclass(slots=True)
class Choices:
    """The choices of a whole answer, put together from their pieces. A stream never asks for them."""

    pieces: list[Json] = field(default_factory=list)

    def add(self, choices: tuple[Json, ...]) -> None:
        """Take in a piece's."""
        self.pieces += choices

    def merged(self) -> tuple[Json, ...]:
        """Each choice in one piece, in order."""
        merged: dict[int, Json] = {}
        for choice in self.pieces:
            index = choice.get("index", 0)
            merged[index] = _grown(merged[index], choice) if index in merged else choice
        return tuple(choice for _, choice in sorted(merged.items()))

    def whole(self) -> list[Json]:
        """All choices in order, a chat's `delta`s as messages."""
        return [_with_message(choice) for choice in self.merged()]


def _with_message(choice: Json) -> Json:
    if "delta" not in choice:
        return choice
    message = {"role": "assistant", "content": None, "refusal": None} | choice["delta"]
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    rest = {name: value for name, value in choice.items() if name != "delta"}
    return rest | {"message": message}


def _grown(old: Json, new: Json) -> Json:
    """A piece behind what there is: text grows, lists too (of things with an `index` by it), the rest is replaced."""
    grown = dict(old)
    for name, value in new.items():
        before = old.get(name)
        if value is None:
            grown.setdefault(name, None)
        elif isinstance(value, dict) and isinstance(before, dict):
            grown[name] = _grown(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            grown[name] = _longer(before, value)
        elif isinstance(value, str) and isinstance(before, str) and name in _GROWING:
            grown[name] = before + value
        else:
            grown[name] = value
    return grown


def _longer(old: list[Any], new: list[Any]) -> list[Any]:
    if not all(isinstance(entry, dict) and "index" in entry for entry in (*old, *new)):
        return old + new
    by_index = {entry["index"]: entry for entry in old}
    for entry in new:
        index = entry["index"]
        by_index[index] = _grown(by_index[index], entry) if index in by_index else entry
    return [entry for _, entry in sorted(by_index.items())]
