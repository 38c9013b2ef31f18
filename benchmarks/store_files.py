"""Files of a vector store under load: `python -m benchmarks.store_files URL [--key KEY] [--files 10000]`.

Uploads small files to a node that serves, adds them to a store in batches, and deletes every second one, while a client
asks one question after the other with file search. Prints the times, the time to the first token of the answers, and
how many of some searches found what was deleted, or not what was kept. The store and its files are removed at the end.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
from openai.types.vector_stores.file_batch_create_params import File

from benchmarks.common.report import table

_BATCH, _THREADS, _CHECKED = 2000, 8, 200
_TEXT = "words that all of the files have in common. " * 5


class Chats:
    """A client that asks until `stop`; `first_token_s` has the times, `errors` what failed."""

    def __init__(self, client: openai.OpenAI, store: str) -> None:
        self.first_token_s: list[float] = []
        self.errors: list[str] = []
        self._client, self._store, self._stop = client, store, threading.Event()
        self._model = client.models.list().data[0].id
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            begin = time.monotonic()
            try:
                stream = self._client.responses.create(
                    model=self._model, input="Which words are common?", max_output_tokens=8, stream=True,
                    tools=[{"type": "file_search", "vector_store_ids": [self._store], "max_num_results": 2}],
                )  # fmt: skip
                with stream:
                    next(event for event in stream if event.type == "response.output_text.delta")
                self.first_token_s.append(time.monotonic() - begin)
            except (openai.OpenAIError, StopIteration) as error:
                self.errors.append(repr(error)[:200])


@contextlib.contextmanager
def timed(what: str, rows: list[list[str]], count: int) -> Iterator[None]:
    """Add a row with the duration of the block."""
    begin = time.monotonic()
    yield
    seconds = time.monotonic() - begin
    rows.append([what, f"{seconds:.1f} s", f"{count / seconds:.0f} a second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a node with [stores] and a model, without /v1")
    parser.add_argument("--key", default="unused")
    parser.add_argument("--files", type=int, default=10_000)
    given = parser.parse_args()
    client = openai.OpenAI(base_url=f"{given.url}/v1", api_key=given.key, max_retries=3, timeout=120)
    store, rows, count = client.vector_stores.create(name="benchmark").id, list[list[str]](), given.files

    def upload(number: int) -> str:
        content = f"unique{number} {_TEXT}".encode()
        return client.files.create(file=(f"{number}.txt", content), purpose="assistants").id

    def is_right(number: int) -> bool:
        found = client.vector_stores.search(
            store, query=f"unique{number}", filters={"type": "eq", "key": "number", "value": number}
        )
        return [one.filename for one in found] == [f"{number}.txt"] * (number % 2)

    with ThreadPoolExecutor(_THREADS) as pool:
        with timed("upload", rows, count):
            files = list(pool.map(upload, range(count)))
        chats = Chats(client, store)
        with timed("index", rows, count):
            for begin in range(0, count, _BATCH):
                numbers = range(begin, min(begin + _BATCH, count))
                batch: list[File] = [{"file_id": files[one], "attributes": {"number": one}} for one in numbers]
                client.vector_stores.file_batches.create(store, files=batch)
            while client.vector_stores.retrieve(store).file_counts.in_progress:
                time.sleep(0.5)
        failed = client.vector_stores.retrieve(store).file_counts.failed
        with timed("delete every second", rows, len(files[::2])):
            list(pool.map(client.files.delete, files[::2]))
        chats.stop()
        wrong = sum(not right for right in pool.map(is_right, range(min(_CHECKED, count))))
        client.vector_stores.delete(store)
        list(pool.map(client.files.delete, files[1::2]))
    print("\n".join(table(["", "time", "files"], rows)))
    times = sorted(chats.first_token_s) or [0.0]
    print(f"{len(times)} answers, first token after {times[len(times) // 2]:.2f} s (median), {times[-1]:.2f} s at most")
    print(f"{len(chats.errors)} errors {chats.errors[:1]}; {failed} files failed; {wrong} searches wrong")


if __name__ == "__main__":
    main()
