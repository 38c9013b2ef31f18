"""The system's limit of threads."""

import threading

import pytest


def permit_threads(patch: pytest.MonkeyPatch, count: int = 0) -> list[None]:
    """Permit only so many more threads to start. Returns a list with as many elements as still may: append to it to
    permit more."""
    permitted, start = [None] * count, threading.Thread.start

    def start_permitted(thread: threading.Thread) -> None:
        if not permitted:
            raise RuntimeError("can't start new thread")
        permitted.pop()
        start(thread)

    patch.setattr(threading.Thread, "start", start_permitted)
    return permitted
