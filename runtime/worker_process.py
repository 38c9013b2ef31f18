"""Entry of the template from which the supervisor forks workers (`runtime.node.forking`), with the descriptor of its
socket as argument."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

from runtime.node.config import Role
from runtime.node.forking import serve
from runtime.node.worker import Worker, die_with_parent, main


def loop_of(role: Role) -> Callable[[Worker], None]:
    """Import the loop of a role, once the role is known: a worker loads nothing of the others."""
    match role:
        case "pool":
            from runtime.pool.process import run
        case "prefill":
            from runtime.serving.prefill.process import run
        case "decode":
            from runtime.serving.decode.process import run
        case "engine":
            from runtime.engines.vllm.process import run
        case "frontend":
            from runtime.engines.frontend import run
        case "http":
            from runtime.serving.http.http_worker import run
    return run


def load(roles: Sequence[Role]) -> None:
    """Import what workers of these roles do, as far as it is installed: a worker reports what is missing."""
    with contextlib.suppress(ImportError):  # of every role, with numba and its compiled functions of rings
        import runtime.retrieval.search.client
    if {"prefill", "decode"}.intersection(roles):
        with contextlib.suppress(ImportError):
            import runtime.serving.network.llama  # noqa: F401
    for role in roles:
        with contextlib.suppress(ImportError):
            loop_of(role)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    serve(socket.socket(fileno=int(sys.argv[1])), load, partial(main, loop_of))
