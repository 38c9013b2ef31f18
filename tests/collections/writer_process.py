"""A writer process to be killed: prints each write before and after it is made.

python -m tests.collections.writer_process DIR SEED
"""

import random
import sys
from pathlib import Path

from runtime.errors import Overloaded
from runtime.retrieval.collections.writer import CollectionWriter
from tests.collections.small_collections import document


def main(directory: Path, seed: int) -> None:
    chance = random.Random(seed)
    with CollectionWriter(directory, seal_rows=16) as writer:
        print("open", flush=True)
        for step in range(1_000_000):
            names = [str(number) for number in chance.sample(range(60), chance.randint(1, 8))]
            deletes = chance.random() < 0.3
            print("begin", "delete" if deletes else "upsert", 1000 * step, *names, flush=True)
            if deletes:
                writer.delete(names)
            else:
                documents = [document(name, 1000 * step + int(name)) for name in names]
                try:
                    writer.upsert(documents)
                except Overloaded:
                    writer.flush()
                    writer.upsert(documents)
            print("done", flush=True)
            if step == 4 or chance.random() < 0.02:  # seldom: it waits for builds in the background
                writer.compact()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
