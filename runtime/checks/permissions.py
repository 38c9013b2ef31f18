"""Checks that other users of the machine can read neither keys nor collections."""

import stat
from collections.abc import Iterator
from pathlib import Path

from runtime.checks.finding import Finding
from runtime.node.config import NodeConfig
from runtime.node.engine_config import OpenAiSection


def findings(config: NodeConfig) -> Iterator[Finding]:
    """Yield a finding for each keys file and each collection of a configuration that exists."""
    keys = [config.http.api_keys_file]
    keys += [config.model.api_key_file] if isinstance(config.model, OpenAiSection) else []
    keys += [collection.embedder_key_file for collection in config.collections]
    keys += [config.rerank.key_file]
    for key in dict.fromkeys(Path(key) for key in keys if key):
        yield from _finding("keys", key, f"chmod o= {key}")
    for collection in config.collections:
        path = Path(collection.path)
        yield from _finding(f"files of {collection.name}", path, f"chmod -R o= {path}")


def _finding(subject: str, path: Path, advice: str) -> Iterator[Finding]:
    try:
        exposed = is_readable_by_others(path)
    except OSError:  # reported by the checks that open it
        return
    text = f"other users {'can' if exposed else 'cannot'} read {path}"
    yield Finding.of(not exposed, subject, text, advice)


def is_readable_by_others(path: Path) -> bool:
    """Return whether users other than the owner and the group can reach and read a file or directory.

    Raises `OSError`.
    """
    path = path.resolve(strict=True)
    mode = path.stat().st_mode
    wanted = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
    return bool(mode & wanted) and all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
