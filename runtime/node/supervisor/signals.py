"""The signals of a supervisor: two ways to stop its node, the end of a process, and those that must not end it."""

import contextlib
import signal
import socket
from collections.abc import Callable

_UNUSED = (
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR,
    signal.SIGSTKFLT, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)  # fmt: skip
"""Signals that would end a process although nobody means to end a node with them: ignored."""


class Signals:
    """Calls `stop` on SIGTERM and SIGINT, `hang_up` on SIGHUP; readable once a signal has arrived, until `clear`."""

    def __init__(self, stop: Callable[[], None], hang_up: Callable[[], None]) -> None:
        self._arrived, self._wake = socket.socketpair()
        for end in (self._arrived, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, lambda number, frame: stop())
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the node outlives its terminal
            signal.signal(signal.SIGHUP, lambda number, frame: hang_up())
        # It wakes the loop, which reaps the process; ignored, as by some that start nodes, exit codes would be lost.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for unused in _UNUSED:
            signal.signal(unused, signal.SIG_IGN)  # by workers, too: an ignored signal stays ignored across exec

    def fileno(self) -> int:
        return self._arrived.fileno()

    def clear(self) -> None:
        """Forget the signals that have arrived; their functions have been called."""
        with contextlib.suppress(BlockingIOError):
            while self._arrived.recv(64):
                pass
