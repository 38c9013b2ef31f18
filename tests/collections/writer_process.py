"""A writer to be killed, in a process of its own: tells each write before and after it is made."""

import os
import random
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from runtime.errors import CollectionError, Overloaded
from runtime.retrieval.collections.writer import CollectionWriter
from tests.collections.small_collections import document, maintain

SEAL_ROWS = 16


def run(directory: Path, seed: int, background: bool, output: Connection) -> None:
    """Write until killed. background: build segments in processes, as a node does; else on a thread, which takes
    milliseconds instead of the start of a process."""

    def tell(*words: object) -> None:
        os.write(output.fileno(), (" ".join(map(str, words)) + "\n").encode())

    chance = random.Random(seed)
    with CollectionWriter(directory, seal_rows=SEAL_ROWS, background=background) as writer:
        tell("open")
        due = threading.Event()
        if not background:
            threading.Thread(target=_maintain, args=(writer, due), daemon=True).start()
        for step in range(1_000_000):
            names = [str(number) for number in chance.sample(range(60), chance.randint(1, 8))]
            deletes = chance.random() < 0.3
            tell("begin", "delete" if deletes else "upsert", 1000 * step, *names)
            if deletes:
                writer.delete(names)
            else:
                documents = [document(name, 1000 * step + int(name)) for name in names]
                try:
                    writer.upsert(documents)
                except Overloaded:
                    writer.flush()
                    writer.upsert(documents)
            tell("done")
            due.set()
            if (step == 4 and not background) or chance.random() < 0.02:  # it waits for builds of processes
                writer.compact()


def _maintain(writer: CollectionWriter, due: threading.Event) -> None:
    while due.wait():
        due.clear()
        with suppress(CollectionError):  # the writer is closed
            while maintain(writer, writer.maintenance.build_here):
                pass
