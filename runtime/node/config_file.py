"""Loading of the configuration file: TOML, with relative paths made absolute."""

import os
import tomllib
from pathlib import Path

import msgspec

from runtime.errors import ConfigError
from runtime.files import read_regular
from runtime.node.config import NodeConfig, parse_config
from runtime.node.engine_config import ModelSection, OpenAiSection, VllmSection

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
        return _absolute(parse_config(raw), path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _absolute(config: NodeConfig, folder: Path) -> NodeConfig:
    replace = msgspec.structs.replace

    def under(key: str, path: str) -> str:
        if not path:
            return ""
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

    http = replace(config.http, api_keys_file=under("http.api_keys_file", config.http.api_keys_file))
    collections = tuple(
        replace(
            collection,
            path=under(f"collections[{index}].path", collection.path),
            embedder=collection.embedder
            if collection.embedder.startswith(("http://", "https://"))
            else under(f"collections[{index}].embedder", collection.embedder),
            embedder_key_file=under(f"collections[{index}].embedder_key_file", collection.embedder_key_file),
        )
        for index, collection in enumerate(config.collections)
    )
    model = config.model
    if isinstance(model, ModelSection) and _is_path(model.name):
        model = replace(model, name=under("model.name", model.name))
    elif isinstance(model, OpenAiSection):
        model = replace(model, api_key_file=under("model.api_key_file", model.api_key_file))
    elif isinstance(model, VllmSection):
        path = under("model.path", model.path) if _is_file_path(model.path) else model.path
        python = under("model.python", model.python) if "/" in model.python else model.python
        model = replace(model, path=path, python=python)
    node = replace(config.node, run_dir=under("node.run_dir", config.node.run_dir))
    kv = replace(config.kv, disk_path=under("kv.disk_path", config.kv.disk_path))
    stores = replace(config.stores, path=under("stores.path", config.stores.path))
    rerank = replace(config.rerank, key_file=under("rerank.key_file", config.rerank.key_file))
    if not rerank.url:
        rerank = replace(rerank, model=under("rerank.model", rerank.model))
    log = replace(config.log, directory=under("log.directory", config.log.directory))
    return replace(
        config, node=node, log=log, kv=kv, http=http, model=model, stores=stores, rerank=rerank,
        collections=collections,
    )  # fmt: skip


def _is_file_path(path: str) -> bool:
    """Whether it is a file path: names on Hugging Face's hub contain a slash, too."""
    return path.startswith(("/", ".", "~"))


def _is_path(name: str) -> bool:
    return "/" in name or name.startswith((".", "~"))
