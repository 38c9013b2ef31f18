"""Configuration of torch's compiler, for all programs of the network."""

import os
from functools import cache

from runtime.serving.model.cache import private_cache

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@cache
def prepare_compiler() -> None:
    """Import and configure the compiler. It runs when a compiled function is called with shapes that are new to it, and
    keeps its results on disk: a later start loads them. Raises `ModelError` if that directory is not private."""
    if _CACHE not in os.environ:  # torch's default is a directory in /tmp, which the next boot or container lacks
        os.environ[_CACHE] = str(private_cache("torch", "compiler cache"))
    import torch._dynamo.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = 64  # one attention program for each power of two of rows
    torch._inductor.config.compile_threads = 1  # in this process: there is one program to compile at a time
