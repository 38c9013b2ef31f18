"""What may stand at a key of the configuration, read from the types of its sections."""

import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect
from msgspec.inspect import (
    BoolType,
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


def expected_at(config: type[msgspec.Struct], path: str) -> str:
    """The choices at a key, such as "one of 'a', 'b'" or "a whole number of 1 to 9 or 'auto'".

    `path` is the key's, as msgspec writes it: "pool.slots", "collections[1].verify". "" where there are no named
    choices: msgspec's own message says what is expected then.
    """
    kinds: list[Type] = [inspect.type_info(config)]
    for part in re.findall(r"[^.\[\]]+", path):
        kinds = [kind for one in kinds for kind in _under(one, part)]
    names = sorted({repr(name) for kind in kinds if isinstance(kind, LiteralType) for name in kind.values})
    if not names:
        return ""
    numbers = [_range(kind) for kind in kinds if isinstance(kind, IntType | FloatType)]
    named = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return " or ".join([*numbers, named])


def described(kind: Type) -> str:
    """What may stand at a key of this type: "a whole number of 1 to 9 or 'auto'", "true or false", "a list: text"."""
    if isinstance(kind, VarTupleType):
        most = "" if kind.max_length is None else f" of {kind.max_length} at most"
        return f"a list{most}: {described(kind.item_type)}"
    if isinstance(kind, UnionType):
        return " or ".join(described(member) for member in kind.types if not isinstance(member, NoneType))
    if isinstance(kind, LiteralType):
        return ", ".join(f'`"{name}"`' for name in kind.values)
    if isinstance(kind, IntType | FloatType):
        return _range(kind)
    if isinstance(kind, StrType):
        return "text" + (f" like `{kind.pattern.removesuffix(_END)}`" if kind.pattern else "")
    if isinstance(kind, BoolType):
        return "`true`, `false`"
    raise TypeError(f"no words for {kind}")


_END = r"\Z"


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
