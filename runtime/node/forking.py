"""The process from which a node's workers are forked, the template: what several of them import is imported once.

    supervisor        requests, in turn                  template, without threads
                                                         imports what all workers use
                      ◀───────────────────────── ready
                      roles ──────────────────────────▶  imports what they use; of none: whether it answers
                      ◀───────────────────────── ready
                      environment, descriptors ───────▶  fork ─▶ fork ─▶ the worker, which waits until the process
                      ◀───────────────────────────────── its pid ──┘     between has ended: its parent is then the
                                                                         supervisor, a subreaper meanwhile

The template opens no device and handles no signal. This module imports the standard library alone.
"""

import gc
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

READY = b"ready"
MESSAGE_BYTES = 64 << 10
STDIN, LISTEN, PRIVATE, STACK = "stdin", "listen", "private", "stack"
"""Names of a worker's descriptors. The last ones: the HTTP listening socket, the frontend's for HTTP workers, and the
file for the threads' stacks on a fatal signal."""
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
"""The template's environment, which workers inherit: what it imports starts no threads, which a fork would not have."""
_LOOK_S = 0.0002

Run = Callable[[Mapping[str, int]], int]


def serve(end: socket.socket, load: Callable[[Any], None], run: Run) -> None:
    """Serve requests until the other end is closed.

    `load` imports what workers of these roles use. `run` is a worker's main function: its descriptors but the standard
    input, by name → its exit code.
    """
    gc.disable()  # until a worker is ready: a collection would write to pages that all share
    load(())
    end.send(READY)
    while True:
        message, descriptors, *_ = socket.recv_fds(end, MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        request = json.loads(message)
        if "roles" in request:
            load(request["roles"])
            gc.freeze()
            end.send(READY)
            continue
        if not os.fork():
            between = os.getpid()
            if not os.fork():
                while os.getppid() == between:
                    time.sleep(_LOOK_S)
                _be_worker(end, request["environment"], dict(zip(request["names"], descriptors, strict=True)), run)
            os._exit(0)
        if os.wait()[1]:  # it could not fork
            os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _be_worker(end: socket.socket, environment: Mapping[str, str], descriptors: dict[str, int], run: Run) -> None:
    """Run a worker, which leads a session of its own, and end this process."""
    code = 1
    try:
        os.setsid()
        end.send(str(os.getpid()).encode())
        end.close()
        os.environ.update(environment)
        stdin = descriptors.pop(STDIN)
        os.dup2(stdin, 0)
        os.close(stdin)
        code = run(descriptors)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 0
    except BaseException:  # nothing of it may reach the template's loop
        traceback.print_exc()
    finally:
        os._exit(code)
