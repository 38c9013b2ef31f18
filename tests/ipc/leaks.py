"""Leak checks: the system resources that this process holds, for comparison before and after."""

import gc
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq


@dataclass(frozen=True)
class Holdings:
    """Open descriptors and mapped memfds."""

    fds: int
    memfds: int

    @classmethod
    def now(cls) -> "Holdings":
        maps = Path("/proc/self/maps").read_text()
        return cls(len(os.listdir("/proc/self/fd")), len(re.findall(r"/memfd:trinity", maps)))


def settled() -> Holdings:
    """Return the holdings after ZeroMQ's threads have closed their resources; they wait for every open socket."""
    ended = threading.Thread(target=zmq.Context.instance().term, daemon=True)
    ended.start()
    ended.join(30)
    if ended.is_alive():
        zmq.Context.instance().destroy(linger=0)  # later tests have another
        raise AssertionError("a socket is still open")
    gc.collect()
    return Holdings.now()
