"""What may stand at a key of the configuration, read from the types of its sections; and what is wrong with one."""

import difflib
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.inspect import (
    AnyType,
    BoolType,
    DictType,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)


def allowed_values(config: type[msgspec.Struct], path: str) -> str:
    """The choices at a key, such as "one of 'a', 'b'" or "a whole number of 1 to 9 or 'auto'".

    `path` is the key's, as msgspec writes it: "pool.slots", "collections[1].verify". "" where there are no named
    choices: msgspec's own message says what is expected then.
    """
    kinds = _types_at(config, path)
    names = sorted({repr(name) for kind in kinds if isinstance(kind, LiteralType) for name in kind.values})
    if not names:
        return ""
    numbers = [_range(kind) for kind in kinds if isinstance(kind, IntType | FloatType)]
    named = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return " or ".join([*numbers, named])


def describe_type(kind: Type) -> str:
    """What may stand at a key of this type: "a whole number of 1 to 9 or 'auto'", "true or false", "a list: text"."""
    if isinstance(kind, VarTupleType):
        most = "" if kind.max_length is None else f" of {kind.max_length} at most"
        return f"a list{most}: {describe_type(kind.item_type)}"
    if isinstance(kind, UnionType):
        return " or ".join(describe_type(member) for member in kind.types if not isinstance(member, NoneType))
    if isinstance(kind, LiteralType):
        return ", ".join(f'`"{name}"`' for name in kind.values)
    if isinstance(kind, IntType | FloatType):
        return _range(kind)
    if isinstance(kind, StrType):
        return "text" + (f" like `{kind.pattern.removesuffix(_END)}`" if kind.pattern else "")
    if isinstance(kind, BoolType):
        return "`true`, `false`"
    if isinstance(kind, DictType):
        values = "" if isinstance(kind.value_type, AnyType) else f": {describe_type(kind.value_type)}"
        return f"a table{values}"
    raise TypeError(f"no words for {kind}")


_END = r"\Z"


_AT = re.compile(r" - at `\$([^`]*)`\Z")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*?)`")


def explain_error(message: str, raw: dict[str, Any], config: type[msgspec.Struct]) -> str:
    """msgspec's message about `raw`, with the key's dotted name, the value found there, the choices where it has some,
    and for unknown keys the nearest known."""
    at = _AT.search(message)
    path = at.group(1).lstrip(".") if at else ""
    reason = _AT.sub("", message)
    if unknown := _UNKNOWN.match(reason):
        key = unknown.group(1)
        return f"{path}.{_shown(key)}".removeprefix(".") + f": unknown key{_nearest(_known(config, path, raw), key)}"
    if missing := _MISSING.match(reason):
        return f"{path}.{missing.group(1)}".lstrip(".") + ": required key is missing"
    value = _at(raw, path)
    shown = f" = {value!r}" if isinstance(value, str | int | float | bool) else ""
    choices = allowed_values(config, path)
    return f"{path}{shown}: " + (f"expected {choices}" if choices else f"{reason[0].lower()}{reason[1:]}")


def _shown(key: str) -> str:
    """A key as one would write it; one with a line's end or a dot in it, as Python would."""
    return key if re.fullmatch(r"[\w-]+", key) else repr(key)


def _at(raw: Any, path: str) -> Any:
    """What stands there; None for nothing."""
    for part in _parts(path):
        if isinstance(raw, dict):
            raw = raw.get(part)
        elif isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return None
    return raw


def _known(config: type[msgspec.Struct], path: str, raw: dict[str, Any]) -> list[str]:
    """The keys of the section there. Of several kinds of it (engines) it is the one that the file names."""
    found = _at(raw, path)
    for kind in _types_at(config, path):
        if isinstance(kind, StructType) and (kind.tag_field is None or found.get(kind.tag_field) == kind.tag):
            return [field.encode_name for field in kind.fields]
    return []


def _nearest(known: list[str], key: str) -> str:
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _parts(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _types_at(config: type[msgspec.Struct], path: str) -> list[Type]:
    kinds: list[Type] = [inspect.type_info(config)]
    for part in _parts(path):
        kinds = [kind for one in kinds for kind in _under(one, part)]
    return kinds


def _under(kind: Type, part: str) -> Iterator[Type]:
    """The types that may stand at a key or position of a value of this type; of a union, all of its members' are."""
    if isinstance(kind, VarTupleType):
        yield from _members(kind.item_type)
    elif isinstance(kind, StructType):
        if part == kind.tag_field:
            yield LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == part:
                yield from _members(field.type)


def _members(kind: Type) -> tuple[Type, ...]:
    return kind.types if isinstance(kind, UnionType) else (kind,)


def _range(kind: IntType | FloatType) -> str:
    what = "a whole number" if isinstance(kind, IntType) else "a number"
    bounds = ((" over", kind.gt), (" of", kind.ge), (" below", kind.lt), (" to", kind.le))
    return what + "".join(f"{word} {bound}".removesuffix(".0") for word, bound in bounds if bound is not None)
