"""API keys: the node's, a file with one key per line and what each key grants; and those of other servers.

```
K1                                    everything
K2 notes/tenant=acme                  collection notes, restricted to this attribute value; no other collection
K3 notes/tenant="acme inc" manuals    the same, and all of collection manuals
```
"""

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from runtime.errors import ConfigError
from runtime.files import read_regular
from runtime.node.config import NodeConfig
from runtime.node.engine_config import OpenAiSection

_GRANT = re.compile(r"(?P<collection>[^/=]+)(/(?P<attribute>[^/=]+)=(?P<value>.+))?", re.DOTALL)


class ApiKey(NamedTuple):
    """An API key. `grants`: by collection, the attribute and value that its searches and writes are restricted to, None
    for the whole collection; `grants` None: access to everything."""

    key: str
    grants: Mapping[str, tuple[str, str] | None] | None = None


def read_api_keys(config: NodeConfig) -> tuple[ApiKey, ...]:
    """Read the node's keys; empty lines and lines that begin with # are skipped. Raises `ConfigError`, without showing
    a key."""
    path = config.http.api_keys_file
    if not path:
        return ()
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"http.api_keys_file: cannot read {path}: {reason}") from error
    keys: dict[str, ApiKey] = {}
    known = {collection.name for collection in config.collections}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        where = f"http.api_keys_file: line {number} of {path}"
        key, *rest = line.split(maxsplit=1)
        if not key.isascii() or not key.isprintable():
            raise ConfigError(f"{where}: the key contains characters other than printable ASCII")
        grants = _grants(rest[0], where, known) if rest else None
        if key in keys and keys[key].grants != grants:
            raise ConfigError(f"{where} repeats a key with different grants")
        keys[key] = ApiKey(key, grants)
    if not keys:
        raise ConfigError(f"http.api_keys_file: no key in {path}")
    return tuple(keys.values())


def read_key(path: str, whose: str) -> str:
    """Return the API key of a server, the first line of a file; "" for no file. Raises `ConfigError`, which never
    contains the key."""
    if not path:
        return ""
    try:
        key = read_regular(path).decode("utf-8-sig").partition("\n")[0].strip()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{whose} key cannot be read from {path}: {reason}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{whose} key cannot be read from {path}: its first line is not printable ASCII")
    return key


def read_engine_key(section: OpenAiSection) -> str:
    """Return the API key of the model's servers. Raises as `read_key`."""
    return read_key(section.api_key_file, "model.api_key_file: the servers'")


def _grants(text: str, where: str, known: set[str]) -> dict[str, tuple[str, str] | None]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    grants: dict[str, tuple[str, str] | None] = {}
    for number, word in enumerate(words, 1):
        grant = _GRANT.fullmatch(word)
        if grant is None:  # not shown: it may be part of a key
            raise ConfigError(f"{where}: grant {number} is neither COLLECTION nor COLLECTION/ATTRIBUTE=VALUE")
        name = grant["collection"]
        if name not in known:
            raise ConfigError(f"{where}: grant {number} names an unknown collection; known: {', '.join(sorted(known))}")
        if name in grants:
            raise ConfigError(f"{where}: collection {name!r} is listed twice")
        grants[name] = (grant["attribute"], grant["value"]) if grant["attribute"] else None
    return grants
