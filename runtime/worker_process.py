"""Entry of a worker's process: the supervisor starts every worker as `python -m runtime.worker_process`."""

import os
import sys
from collections.abc import Callable

from runtime.node.config import Role
from runtime.node.worker import Worker, main


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


if __name__ == "__main__":
    code = main(loop_of)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is closed; the interpreter would take a second or more to unload torch and numba
