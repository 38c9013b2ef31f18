"""Processes of tests, forked from one in which all that they need is imported already."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
_IPC = [f"tests.ipc.test_{name}" for name in ("doorbell", "faults", "handover", "memory", "ring", "session_hostile")]
FORKSERVER.set_forkserver_preload([*_IPC, "runtime.testing.tiny_node", "tests.pool.test_kills"])
"""There is one such server in a process, and the last to say what it imports has the word: all say it here."""
