"""Configuration of torch's compiler, for all programs of the network."""

import os
from functools import cache
from pathlib import Path

from runtime.serving.model.cache import private_cache

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@cache
def prepare_compiler() -> None:
    """Import and configure the compiler. It runs when a compiled function is called with shapes that are new to it, and
    keeps its results on disk: a later start loads them. Raises `ModelError` if that directory is not private."""
    os.environ[_CACHE] = str(cache_directory())
    import torch._dynamo.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = 64  # one attention program for each power of two of rows
    torch._inductor.config.compile_threads = 1  # in this process: there is one program to compile at a time


def cache_directory() -> Path:
    """Return the directory of compiled programs. Raises `ModelError` if it is not private."""
    if _CACHE in os.environ:
        return Path(os.environ[_CACHE])
    return private_cache("torch", "compiler cache")  # torch's default, in /tmp, is lost at the next boot
