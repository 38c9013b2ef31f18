"""What this process holds of the system's resources, to be compared before and after."""

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
    """What is held once ZeroMQ's own threads have closed what they had to; they wait for every open socket."""
    ended = threading.Thread(target=zmq.Context.instance().term, daemon=True)
    ended.start()
    ended.join(30)
    if ended.is_alive():
        zmq.Context.instance().destroy(linger=0)  # the tests that follow have another
        raise AssertionError("a socket is still open")
    gc.collect()
    return Holdings.now()
