"""The other way to serve: a process that prefills and decodes in one loop, with the classes of both workers.

In turn a chunk of a prompt and a step of the batch, as chunked prefill does it (Sarathi-Serve, arXiv 2403.02310), so
that a long prompt holds the batch for a chunk at a time. Its two halves hand KV over as two workers do: a copy within
one machine's memory, small beside the passes through the model.
"""

import logging
import os
import sys

import msgspec
import zmq

from runtime.node.worker import Worker, WorkerSpec, die_with_parent
from runtime.serving.decode.process import DecodeWorker
from runtime.serving.prefill.process import PrefillWorker

_IDLE_MS = 2  # the pool's answers do not wake this poll


def main() -> None:
    """Serve until killed."""
    specs = [msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec) for _ in range(2)]
    die_with_parent(specs[0].supervisor_pid)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    workers = [Worker(spec) for spec in specs]
    os.sched_setaffinity(0, workers[0].placement.cores)
    prefill, decode = PrefillWorker(workers[0]), DecodeWorker(workers[1])
    prefill._sleep = decode._sleep = lambda: None  # type: ignore[method-assign]
    poller = zmq.Poller()
    for socket in (prefill._link.socket, prefill._source.socket, decode.link.socket, decode._sink.socket):
        poller.register(socket, zmq.POLLIN)
    for worker in workers:
        worker.ready()
    while True:
        prefill.step()
        decode.step()
        if not prefill._running and not decode._batch.running and not decode.handovers.pulling:
            poller.poll(_IDLE_MS)


if __name__ == "__main__":
    main()
