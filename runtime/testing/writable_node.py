"""A node that serves a collection, for tests that write to it and kill its processes."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil

from runtime.retrieval.collections import maintenance
from runtime.retrieval.collections.bulk_load import create
from runtime.testing.node import Node

DIM = 64
DOCUMENTS, FLUSH = "/v1/collections/notes/documents", "/v1/collections/notes/flush"
_CONFIG = """
[node]
name = "writable"
run_dir = "run"

[http]
port = 0
drain_notice_s = 0

[[collections]]
name = "notes"
path = "notes"
"""

_PLAIN = """
[[collections]]
name = "plain"
path = "plain"
"""


class WritableNode:
    """A node that serves the collection `notes`, created if missing, and the collection `plain`, if it exists."""

    def __init__(self, home: Path) -> None:
        self.collection, self._config = home / "notes", home / "node.toml"
        if not self.collection.exists():
            create(self.collection, DIM, embedder=f"hashing-{DIM}")
        self._config.write_text(_CONFIG + (_PLAIN if (home / "plain").exists() else ""))
        self.node = Node(self._config)
        self.url = self.node.info.url

    def kill_supervisor(self) -> None:
        """Kill -9 the supervisor, with which its workers end, and start another node with the same files."""
        processes = [psutil.Process(pid) for pid in self.node.pids().values()]
        self.node.process.kill()
        self.node.process.wait()
        psutil.wait_procs(processes, timeout=60)
        self.node = Node(self._config)
        self.url = self.node.info.url

    def builders(self) -> list[int]:
        """Return the pids of the writer's build processes."""
        try:
            children = psutil.Process(self.node.pid("frontend-0")).children()
            return [child.pid for child in children if maintenance.__name__ in child.cmdline()]
        except psutil.Error:
            return []

    @contextlib.contextmanager
    def paused_writer(self) -> Iterator[None]:
        """Stop the process that writes, so that what it does can be looked at; continue it if it still exists."""
        pid = self.node.pid("frontend-0")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def wait_ready(self) -> None:
        self.node.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.stop()
