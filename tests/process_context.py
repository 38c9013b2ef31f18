"""Fork server of test processes, with their imports preloaded."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
_IPC = [f"tests.ipc.test_{name}" for name in ("doorbell", "faults", "handover", "memory", "ring", "session_hostile")]
FORKSERVER.set_forkserver_preload(
    [*_IPC, "tests.collections.writer_process", "tests.node.tiny_node", "tests.pool.test_kills"]
)
"""A process has one fork server, and its last preload list wins, so all modules are listed here."""
