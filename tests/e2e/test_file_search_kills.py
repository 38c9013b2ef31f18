"""Every process of a node is killed during a streamed answer with file search, an upload, the indexing of a batch, a
change of attributes and deletes of files and of a store.

The answer ends once, with a result or a typed error; only the deaths of frontend and supervisor may cut connections.
What was acknowledged is there afterwards: files with their content, the batch, the stored response; what was deleted is
not.
"""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

from runtime.testing.node import Node
from runtime.testing.waiting import eventually
from tests.e2e.conftest import STORES, StartNode

VICTIMS = ("prefill-0", "decode-0", "pool-0", "frontend-0", "supervisor")
CUTTING = ("frontend-0", "supervisor")
"""Those that hold the connections of clients."""
BATCH, DELETED = 12, 4  # files
ENDS = ("response.completed", "response.incomplete", "response.failed")
BOUNDARY = "b0"


def text_of(name: str) -> bytes:
    """A text whose first word is in no other."""
    return f"unique{name} {'words that all of the files have in common. ' * 20}".encode()


class Upload:
    """An upload whose body has arrived in part."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        part = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
        body = f'{part}"purpose"\r\n\r\nassistants\r\n{part}"file"; filename="{name}"\r\n\r\n'.encode()
        body += text_of(name) + f"\r\n--{BOUNDARY}--\r\n".encode()
        self._rest = body[len(body) // 2 :]
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        self._connection.putrequest("POST", "/v1/files")
        self._connection.putheader("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
        self._connection.putheader("Content-Length", str(len(body)))
        self._connection.endheaders(body[: len(body) // 2])

    def finish(self) -> bool:
        """Send the rest; return whether the upload was acknowledged, False if the connection was cut."""
        with contextlib.closing(self._connection), contextlib.suppress(OSError, http.client.HTTPException):
            self._connection.send(self._rest)
            answer = self._connection.getresponse()
            assert answer.status == 200, answer.read()
            return True
        return False


class Ended(NamedTuple):
    """How a stream ended: by an event, with its response, or by its connection."""

    kind: str
    response: Any = None


def end_of(stream: Iterator[Any]) -> Ended:
    """Read a stream to its end."""
    ends: list[Ended] = []
    with contextlib.suppress(openai.APIError, OSError, httpx.HTTPError):
        ends.extend(Ended(event.type, event.response) for event in stream if event.type in ENDS)
    assert len(ends) <= 1, ends
    return ends[0] if ends else Ended("cut")


def kill(node: Node, victim: str) -> Node:
    """Kill -9 a process; return the ready node, another one if its supervisor died."""
    if victim != "supervisor":
        node.kill(victim)
        return node
    processes = [psutil.Process(pid) for pid in node.pids().values()]
    node.process.kill()
    node.process.wait(timeout=60)
    psutil.wait_procs(processes, timeout=60)
    return Node(node.config)


@pytest.fixture
def nodes(new_node: StartNode) -> Iterator[list[Node]]:
    nodes = [new_node(more=STORES)]
    yield nodes
    nodes[-1].stop()


def client_of(node: Node, retries: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.info.url}/v1", api_key="none", max_retries=retries, timeout=120)


def upload(client: openai.OpenAI, names: list[str]) -> dict[str, str]:
    """Upload files; return their names by id."""
    return {client.files.create(file=(name, text_of(name)), purpose="assistants").id: name for name in names}


def change(changes: Mapping[str, Callable[[], object]], done: set[str]) -> None:
    """Make changes until one fails; add the names of those that are acknowledged to `done`."""
    with contextlib.suppress(openai.APIError, httpx.HTTPError):
        for name, make in changes.items():
            make()
            done.add(name)


def disturb(
    node: Node, client: openai.OpenAI, victim: str, store: str, files: list[str], changes: dict[str, Callable[[], Any]]
) -> tuple[Node, Ended, bool, str, set[str]]:
    """Kill a process while an answer is streamed, a file uploaded, a batch indexed and changes made; return the node,
    how the answer ended, whether the upload was acknowledged, the batch, and which changes were acknowledged."""
    tool: Any = {"type": "file_search", "vector_store_ids": [store]}
    stream = client.responses.create(
        model="tiny", input=f"say much about {victim}", tools=[tool], stream=True, max_output_tokens=800, temperature=0
    )
    next(event for event in stream if event.type == "response.output_text.delta")
    batch = client.vector_stores.file_batches.create(store, file_ids=files).id
    half, done = Upload(node.info.url, f"{victim}-half.txt"), set[str]()
    changing = threading.Thread(target=change, args=(changes, done))
    changing.start()
    node = kill(node, victim)
    finished = half.finish()
    changing.join()
    return node, end_of(stream), finished, batch, done


def finish_deletes(client: openai.OpenAI, store: str, other: str, doomed: dict[str, str], done: set[str]) -> None:
    """Check that what was deleted is gone, and delete the rest of the files `doomed` and the store `other`."""
    left = {file.id for file in client.files.list()}
    assert left.isdisjoint(done)
    for id in done & doomed.keys():
        filters: Any = {"type": "eq", "key": "filename", "value": doomed[id]}
        assert not client.vector_stores.search(store, query=f"unique{doomed[id]}", filters=filters).data
    for id in left & doomed.keys():
        client.files.delete(id)
    if other in done:
        assert other not in [found.id for found in client.vector_stores.list()]
    with contextlib.suppress(openai.NotFoundError):
        client.vector_stores.delete(other)


def check(client: openai.OpenAI, store: str, batch: str, files: list[str], names: dict[str, str]) -> None:
    """Wait for a batch; check the content of all files, and that a search finds those of the batch."""
    eventually(
        lambda: client.vector_stores.file_batches.retrieve(batch, vector_store_id=store).status == "completed",
        120,
        "the batch to be indexed",
    )
    for id, name in names.items():
        assert client.files.content(id).read() == text_of(name)

    def found(id: str) -> set[str]:
        filters: Any = {"type": "eq", "key": "filename", "value": names[id]}
        return {one.file_id for one in client.vector_stores.search(store, query=f"unique{names[id]}", filters=filters)}

    for id in files:
        eventually(lambda id=id: found(id), 60, f"{names[id]} to be found: a pool may be late to apply a write")  # type: ignore[misc]
        assert found(id) == {id}


def test_whoever_dies_an_answer_ends_once_and_nothing_acknowledged_is_lost(nodes: list[Node]) -> None:
    names: dict[str, str] = {}  # of acknowledged files, by id
    with client_of(nodes[0], 0) as client:
        store = client.vector_stores.create(name="kept").id
    for killed, victim in enumerate(VICTIMS, 1):
        with client_of(nodes[-1], 0) as client:
            doomed = upload(client, [f"{victim}-gone-{number}.txt" for number in range(DELETED)])
            client.vector_stores.file_batches.create_and_poll(store, file_ids=list(doomed), poll_interval_ms=50)
            new_files = upload(client, [f"{victim}-{number}.txt" for number in range(BATCH)])
            names |= new_files
            files = list(new_files)
            other = client.vector_stores.create(file_ids=list(doomed)).id
            marked = partial(
                client.vector_stores.files.update, files[0], vector_store_id=store, attributes={"by": victim}
            )
            changes: dict[str, Callable[[], Any]] = {"mark": marked}
            changes |= {id: partial(client.files.delete, id) for id in doomed}
            changes |= {other: partial(client.vector_stores.delete, other)}
            node, ended, finished, batch, done = disturb(nodes[-1], client, victim, store, files, changes)
        nodes.append(node)
        assert finished == (victim not in CUTTING)
        assert ended.kind in ENDS or victim in CUTTING, ended  # it may have ended before its connection was cut
        node.wait_ready()
        with client_of(node, 8) as client:
            finish_deletes(client, store, other, doomed, done)
            if ended.kind == "response.failed":
                assert ended.response.error.code
            elif ended.response is not None:
                assert client.responses.retrieve(ended.response.id).output_text == ended.response.output_text
            found = {file.id: file.filename for file in client.files.list()}
            new = [name for id, name in found.items() if id not in names]
            assert new == [f"{victim}-half.txt"] * finished
            assert names.keys() <= found.keys()
            names = dict(reversed(found.items()))
            check(client, store, batch, files, names)
            by: Any = {"type": "eq", "key": "by", "value": victim}

            def marked_files(by: Any = by, client: openai.OpenAI = client, store: str = store) -> set[str]:
                return {one.file_id for one in client.vector_stores.search(store, query="unique", filters=by)}

            if "mark" in done:
                eventually(marked_files, 60, "the attributes to be found")
            assert marked_files() <= {files[0]}
            assert client.vector_stores.retrieve(store).file_counts.completed == killed * BATCH
        assert {path.name for path in (node.config.parent / "stores" / "files").iterdir()} == set(names)
