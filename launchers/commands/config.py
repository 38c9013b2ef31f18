"""`trinity config`, which prints docs/configuration.md, and `trinity doctor`."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.inspect import type_info
from msgspec.structs import FieldInfo, fields
from rich.console import Console
from rich.markup import escape

from runtime.checks.diagnosis import diagnose
from runtime.node.config import NodeConfig
from runtime.node.config_errors import describe_type
from runtime.node.config_file import load_config
from runtime.node.engine_config import Section

_HEAD = """\
# Configuration

A node is configured by one TOML file: `trinity serve --config node.toml`. `trinity config` prints this page, which is
generated from the types that validate the file. Missing keys have their defaults. Unknown keys, values out of bounds
and inconsistent settings are refused before anything starts, with the key, the value and the limit (`trinity doctor
--config node.toml` also checks files, ports and memory). Relative paths are relative to the file's folder. A node
without `[model]` serves retrieval only.
"""
_TITLES = {name: f', `engine = "{name}"`' for name in ("trinity", "openai", "vllm")}


def config() -> None:
    """Print all configuration keys with defaults and limits."""
    print(reference(), end="")


def reference() -> str:
    """Return the text of docs/configuration.md."""
    parts = [_HEAD]
    for name, section in _sections():
        title = f"[[{name}]]" if name == "collections" else f"[{name}]"
        tag = section.__struct_config__.tag
        parts.append(f"## {title}{_TITLES.get(tag, '') if isinstance(tag, str) else ''}\n")
        parts.append(_text(section))
        parts.append(_table(section))
    return "\n".join(parts)


def _sections() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for field in fields(NodeConfig):
        for struct in _structs(field.type):
            yield field.name, struct
            yield from _tables_within(field.name, struct)


def _tables_within(name: str, section: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Iterate over nested tables; tables of one type share a description."""
    names: dict[type[msgspec.Struct], list[str]] = {}
    for field in fields(section):
        for struct in _structs(field.type):
            names.setdefault(struct, []).append(f"{name}.{field.name}")
    for struct, alike in names.items():
        yield "] and [".join(alike), struct


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for member in getattr(kind, "__args__", ()):
        yield from _structs(member)


def _text(section: type[msgspec.Struct]) -> str:
    """Return the docstrings of a section and its base classes."""
    own = [
        kind
        for kind in section.__mro__
        if kind.__module__.startswith("runtime.node.") and kind is not Section and kind.__doc__
    ]
    return "\n\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in own) + "\n"


def _table(section: type[msgspec.Struct]) -> str:
    lines = ["| key | default | values |", "|---|---|---|"]
    lines += [
        f"| `{field.name}` | {_default(field)} | {_cell(describe_type(type_info(field.type)))} |"
        for field in fields(section)
        if not any(_structs(field.type))
    ]
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT:
        return "`{}`"
    return "not set" if field.default is None else f"`{_toml(field.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else re.sub(r"\.0\Z", "", str(value)) if value else "0"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---- `trinity doctor`: findings about this machine, one line each, with advice


_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    config: Annotated[
        Path | None, typer.Option(readable=False, help="Also check the requirements of this configuration.")
    ] = None,
) -> None:
    """Check whether this machine can run a node. Exits with 1 on errors."""
    console = Console(soft_wrap=True)
    worst = 0
    for finding in diagnose(load_config(config) if config else None):
        colour = _COLOURS[finding.level]
        console.print(f"[{colour}]{finding.level:7}[/{colour}] {escape(finding.subject)}: {escape(finding.text)}")
        if finding.advice:
            console.print(f"        → {escape(finding.advice)}")
        worst = max(worst, int(finding.level == "error"))
    raise typer.Exit(worst)
