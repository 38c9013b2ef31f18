"""Search of a collection on two other nodes against a local one: `python -m benchmarks.fleet.remote`.

Four retrieval nodes on this machine: one with all passages of Python's documentation, two with half of them each, and
one in front of the halves by [[remote]]. The same searches go to the first and the last, in pairs and in random order:
by text, which the whole node embeds once and the halves once each, and by vector. The ids of both responses are
compared, including their order.
"""

import argparse
import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from benchmarks.fleet.pairs import HEAD, Pair, Request, pairs, row
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.python_docs import python_documents
from runtime.retrieval.embedding.onnx_model import MINILM
from runtime.testing.node import Node

_NODE = '[node]\nname = "{name}"\nrun_dir = "{home}/run-{name}"\n[http]\nport = 0\n'
_OWN = '[[collections]]\nname = "docs"\npath = "{home}/{name}"\n'
_REMOTE = '[[remote]]\nname = "docs"\nnodes = {nodes}\n'
K = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=400)
    parser.add_argument("--embedder", default=MINILM, help="as in `trinity index build`")
    parser.add_argument("--count", type=int, default=500, help="pairs per kind, all different")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="output files OUT.md and OUT.json")
    options = parser.parse_args()
    documents, order = python_documents(), random.Random(options.seed)
    queries = [" ".join(one.text.split()[:12]) for one in order.sample(documents, options.count)]
    documents = documents[: options.passages]
    half = len(documents) // 2
    rows, same = [], []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name, some in (("whole", documents), ("left", documents[:half]), ("right", documents[half:])):
            Collection.build(some, home / name, embedder=options.embedder)
        with _Nodes(home) as nodes:
            texts = [Request("POST", "/v1/retrieval", {"query": text, "k": K}) for text in queries]
            vectors = [
                Request("POST", "/v1/retrieval", {"vector": one, "k": K})
                for one in nodes.embed(options.embedder, queries)
            ]
            for kind, requests in (("by text", texts), ("by vector", vectors)):
                found = pairs(nodes.whole, nodes.front, requests, order)
                rows.append(row("[[remote]]", kind, found))
                same.append(f"{sum(map(_same_ids, found))} of {len(found)} {kind}")
    caption = f"{', '.join(machine().values())}; {machine_load()}; {len(documents)} passages, {options.embedder}, "
    caption += f"k = {K}, {options.count} pairs, seed {options.seed}; the same ids in the same order: {', '.join(same)}"
    results = [dict(zip(HEAD, one, strict=True)) for one in rows]
    write(results, "\n".join([caption, "", *table(HEAD, rows)]), options.out)


def _same_ids(pair: Pair) -> bool:
    one, other = ([passage["id"] for passage in answer["passages"]] for answer in pair.answers)
    return one == other


class _Nodes:
    """The four nodes; a context manager."""

    def __init__(self, home: Path) -> None:
        self._home, self._started = home, list[Node]()

    def __enter__(self) -> "_Nodes":
        try:
            with ThreadPoolExecutor() as executor:
                own = [executor.submit(self._start, name, _OWN) for name in ("whole", "left", "right")]
            whole, *parts = (one.result() for one in own)
            self._whole = whole
            self._front = self._start("front", _REMOTE.replace("{nodes}", json.dumps([one.info.url for one in parts])))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._started):
            node.stop()

    @property
    def whole(self) -> str:
        return self._whole.info.url

    @property
    def front(self) -> str:
        return self._front.info.url

    def embed(self, embedder: str, texts: list[str]) -> list[list[float]]:
        """Return the texts' vectors from the first node's embedder."""
        found: list[list[float]] = []
        for text in texts:
            status, answer = self._whole.post("/v1/embeddings", {"model": embedder, "input": text})
            if status != 200:
                raise SystemExit(f"/v1/embeddings: {answer}")
            found.append(answer["data"][0]["embedding"])
        return found

    def _start(self, name: str, section: str) -> Node:
        config = self._home / f"{name}.toml"
        config.write_text((_NODE + section).replace("{home}", str(self._home)).replace("{name}", name))
        node = Node(config)
        self._started.append(node)
        return node


if __name__ == "__main__":
    main()
