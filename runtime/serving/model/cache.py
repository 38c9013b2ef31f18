"""Directories below `$XDG_CACHE_HOME/trinity` (`~/.cache/trinity` by default) that only this user can write to."""

import os
from pathlib import Path

from ipc.native.private import is_private
from runtime.errors import ModelError


def private_cache(name: str, what: str) -> Path:
    """Return the cache directory `name`, created if it is missing; `what` describes it in errors.

    Raises `ModelError` if it cannot be created or if other users can write to it: its files are trusted.
    """
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trinity" / name
    except RuntimeError as error:
        raise ModelError(f"no place for the {what}: this user has no home directory; set XDG_CACHE_HOME") from error
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = is_private(directory)
    except OSError as error:
        raise ModelError(
            f"cannot create the {what} {directory}: {error.strerror}; set XDG_CACHE_HOME to a writable directory"
        ) from error
    if not private:
        raise ModelError(f"other users can write to the {what} {directory}: chmod 700 it, or set XDG_CACHE_HOME")
    return directory
