"""The choices of another server, merged from their pieces when the response is not streamed."""

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
_CONCATENATED = frozenset({"content", "text", "reasoning_content", "reasoning", "refusal", "arguments"})


def merge_choices(pieces: Iterable[Json]) -> tuple[Json, ...]:
    """Return each choice in one piece, by index."""
    merged: dict[int, Json] = {}
    for choice in pieces:
        index = choice.get("index", 0)
        merged[index] = _merge_delta(merged[index], choice) if index in merged else choice
    return tuple(choice for _, choice in sorted(merged.items()))


def with_message(choice: Json) -> Json:
    """Return a choice with its `delta` (of a chat) as `message`."""
    if "delta" not in choice:
        return choice
    message = {"role": "assistant", "content": None, "refusal": None} | choice["delta"]
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    rest = {name: value for name, value in choice.items() if name != "delta"}
    return rest | {"message": message}


def _merge_delta(old: Json, new: Json) -> Json:
    """Concatenate text, merge objects, extend lists (of objects with an `index` by it) and replace the rest."""
    merged = dict(old)
    for name, value in new.items():
        before = old.get(name)
        if value is None:
            merged.setdefault(name, None)
        elif isinstance(value, dict) and isinstance(before, dict):
            merged[name] = _merge_delta(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            merged[name] = _merge_lists(before, value)
        elif isinstance(value, str) and isinstance(before, str) and name in _CONCATENATED:
            merged[name] = before + value
        else:
            merged[name] = value
    return merged


def _merge_lists(old: list[Any], new: list[Any]) -> list[Any]:
    if not all(isinstance(entry, dict) and "index" in entry for entry in (*old, *new)):
        return old + new
    by_index = {entry["index"]: entry for entry in old}
    for entry in new:
        index = entry["index"]
        by_index[index] = _merge_delta(by_index[index], entry) if index in by_index else entry
    return [entry for _, entry in sorted(by_index.items())]
