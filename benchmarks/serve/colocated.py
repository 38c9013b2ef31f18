"""Colocated baseline: a process that prefills and decodes in one loop, with the classes of both workers.

It alternates a prompt chunk and a step of the batch, like chunked prefill (Sarathi-Serve, arXiv 2403.02310), so a long
prompt blocks the batch for one chunk at a time. The two halves hand KV over like two workers: a memory copy, small
compared with the model's passes.
"""

import logging
import os
import sys

import msgspec
import zmq

from runtime.node.worker import Worker, WorkerSpec, die_with_parent
from runtime.serving.decode.process import DecodeWorker
from runtime.serving.prefill.process import PrefillWorker

_IDLE_MS = 2  # results of the pool do not wake this poll


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
    for socket in (prefill.link.socket, prefill._source.socket, decode.link.socket, decode._sink.socket):
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
