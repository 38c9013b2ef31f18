"""Parser of nvdisasm listings."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+),")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;?\s*$")
_ADDRESS = re.compile(r"^(?:desc\[UR\d+\])?\[(.*)\]$")
_CONSTANT = re.compile(r"^c\[0x0\]\[(0x[0-9a-f]+)\]$")


class Operand(NamedTuple):
    """An operand. kind: R, P, UR, UP, c (constant bank), # (immediate), @ (address), L (label) or ? (other)."""

    kind: str
    number: int = 0
    negated: bool = False
    inverted: bool = False
    absolute: bool = False
    parts: tuple[Any, ...] = ()


class Instruction(NamedTuple):
    guard: Operand | None
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    line: str


class Kernel(NamedTuple):
    code: list[Instruction]
    labels: dict[str, int]


def kernels_of(listing: str) -> dict[str, Kernel]:
    """Parse the output of nvdisasm -c, by kernel."""
    found: dict[str, Kernel] = {}
    kernel: Kernel | None = None
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            kernel = found.setdefault(section[1], Kernel([], {}))
        elif kernel is not None and (label := _LABEL.match(line)):
            kernel.labels[label[1]] = len(kernel.code)
        elif kernel is not None and (parts := _LINE.match(line)):
            _, negated, guard, opcode, rest = parts.groups()
            name, *modifiers = opcode.split(".")
            operands = tuple(_operand(text) for text in _split(rest))
            on = _operand(("!" if negated else "") + guard) if guard else None
            kernel.code.append(Instruction(on, name, tuple(modifiers), operands, line.strip()))
    return found


def _split(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for i, sign in enumerate(text):
        depth += (sign in "[(") - (sign in ")]")
        if sign == "," and depth == 0:
            yield text[begin:i].strip()
            begin = i + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _operand(text: str) -> Operand:
    negated = inverted = absolute = False
    while text[:1] in "-!~|" and not re.match(r"-?(0x|\d|INF|QNAN)", text):
        negated, inverted = negated or text[0] == "-", inverted or text[0] in "!~"
        absolute = absolute or text[0] == "|"
        text = text[1:].replace("|", "") if text[0] == "|" else text[1:]
    plain = text.split(".")[0]
    if label := re.match(r"`\((\.\w+)\)", text):
        return Operand("L", parts=(label[1],))
    if address := _ADDRESS.match(text):
        return Operand("@", parts=tuple(_operand(part) for part in address[1].replace("+-", "+ -").split("+")))
    if constant := _CONSTANT.match(text):
        return Operand("c", int(constant[1], 16), negated, inverted, absolute)
    if indexed := re.match(r"^c\[0x0\]\[(R\w+)(?:\+(0x[0-9a-f]+))?\]$", text):
        return Operand("c", int(indexed[2] or "0", 16), parts=(_operand(indexed[1]),))
    if match := re.match(r"(UR|UP|R|P|B)(\d+|Z|T)$", plain):
        last = {"UR": 63, "R": 255, "UP": 7, "P": 7}
        number = int(match[2]) if match[2].isdigit() else last[match[1]]
        return Operand(match[1], number, negated, inverted, absolute, tuple(text.split(".")[1:]))
    text = text.replace(" ", "")
    if re.match(r"-?0x", text):
        return Operand("#", int(text, 16) & 0xFFFFFFFFFFFFFFFF, negated, inverted, absolute)
    if re.match(r"[-+]?(\d|INF|QNAN)", text):
        value = np.float32(text.replace("QNAN", "NAN"))
        if re.match(r"-?\d+$", text):
            return Operand("#", int(text) & 0xFFFFFFFFFFFFFFFF, negated, inverted, absolute, (value,))
        return Operand("#", int(value.view(np.uint32)), negated, inverted, absolute, (value,))
    return Operand("?", parts=(text,))
