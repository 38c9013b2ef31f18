"""Loading of the configuration file: TOML, with relative paths made absolute."""

import os
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.errors import ConfigError
from runtime.files import read_regular
from runtime.node.config import NodeConfig, parse_config
from runtime.node.engine_config import Section

_MAX_NAME_BYTES = 255  # Linux's NAME_MAX
_MAX_PATH_BYTES = 4096 - 1 - (1 + _MAX_NAME_BYTES)  # PATH_MAX, less a file name


def load_config(path: Path, name: str = "", port: int | None = None) -> NodeConfig:
    """Load and validate a TOML file. Relative paths in it are resolved against its directory. Raises `ConfigError`.

    name, port: override those of the file, so that several nodes can run from one file.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: the configuration is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of 5,000 digits, deeply nested arrays
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    try:
        for section, key, value in (("node", "name", name or None), ("http", "port", port)):
            if value is not None and isinstance(table := raw.setdefault(section, {}), dict):
                table[key] = value
        folder = path.resolve().parent
        config = _absolute(parse_config(raw), folder)
        rerank = config.rerank
        if rerank.model and not rerank.url:
            rerank = msgspec.structs.replace(rerank, model=_under(folder, "rerank.model", rerank.model))
        return msgspec.structs.replace(config, rerank=rerank)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


_Table = TypeVar("_Table", bound=Section)


def _absolute(section: _Table, folder: Path, where: str = "") -> _Table:
    """Return a section, of which `where` is the prefix of the keys, with absolute paths, also in its tables."""
    changed: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        key, value = f"{where}{field.name}", getattr(section, field.name)
        if isinstance(value, Section):
            changed[field.name] = _absolute(value, folder, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            changed[field.name] = tuple(_absolute(one, folder, f"{key}[{n}].") for n, one in enumerate(value))
        elif any(meta.extra and meta.extra["is_path"](value) for meta in getattr(field.type, "__metadata__", ())):
            changed[field.name] = _under(folder, key, value)
    return msgspec.structs.replace(section, **changed)


def _under(folder: Path, key: str, path: str) -> str:
    if "\0" in path:
        raise ConfigError(f"{key} = {path!r}: a path cannot contain a NUL")
    try:
        whole = folder / Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{key} = {path!r}: {error}") from error
    if (size := len(os.fsencode(whole))) > _MAX_PATH_BYTES or any(
        len(os.fsencode(p)) > _MAX_NAME_BYTES for p in whole.parts
    ):
        raise ConfigError(
            f"{key} = {path[:40]!r}…: the path has {size} bytes; the limits are {_MAX_PATH_BYTES}, and "
            f"{_MAX_NAME_BYTES} for each component"
        )
    return str(whole)
