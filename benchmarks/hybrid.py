"""What words find beside vectors: recall of BM25 (SQLite's FTS5), of vectors, and of both fused by reciprocal rank.

python -m benchmarks.hybrid --data DIR      # of real data: text/squad11_*.jsonl.gz, ann/minilm-384-cosine.*.npy

Questions of SQuAD 1.1 (dev), whose marked passages are what is to be found. Vectors are compared exactly.
"""

import argparse
import gzip
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.retrieval.embedding.embedder import Hashing, embedding_text
from runtime.retrieval.embedding.loading import load_embedder

CONSTANT = 60  # of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)
KS = (1, 5, 10)
Ranks = NDArray[np.int64]  # [questions, depth], row numbers, nearest first; -1 for none


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def words_index(passages: list[dict[str, Any]], tokenizer: str) -> sqlite3.Connection:
    """Titles and texts of passages in a table of FTS5, by row."""
    connection = sqlite3.connect("")
    connection.execute(f"CREATE VIRTUAL TABLE words USING fts5(title, text, content='', tokenize='{tokenizer}')")
    rows = ((row, one["title"], one["text"]) for row, one in enumerate(passages))
    connection.executemany("INSERT INTO words(rowid, title, text) VALUES (?, ?, ?)", rows)
    return connection


def common_words(connection: sqlite3.Connection, most: int) -> frozenset[str]:
    """Words, as the tokenizer leaves them, that more than so many rows have."""
    connection.execute("CREATE VIRTUAL TABLE vocabulary USING fts5vocab(words, 'row')")
    return frozenset(word for (word,) in connection.execute("SELECT term FROM vocabulary WHERE doc > ?", (most,)))


def by_words(
    connection: sqlite3.Connection, questions: list[str], depth: int, without: frozenset[str] = frozenset()
) -> tuple[Ranks, NDArray[np.float64]]:
    """What BM25 finds for a question's words but these, and how many ms of processor time each question took."""
    found, took = np.full((len(questions), depth), -1, np.int64), np.empty(len(questions))
    for number, question in enumerate(questions):
        every = list(dict.fromkeys(re.findall(r"\w+", question.lower())))
        asked = " OR ".join(f'"{word}"' for word in [word for word in every if word not in without] or every)
        begin = time.thread_time()
        sql = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
        rows = [row for (row,) in connection.execute(sql, (asked, depth))]
        took[number] = (time.thread_time() - begin) * 1e3
        found[number, : len(rows)] = rows
    return found, took


def by_vectors(base: NDArray[np.float32], queries: NDArray[np.float32], depth: int) -> Ranks:
    """The rows of the largest dot products."""
    found = []
    for begin in range(0, len(queries), 250):
        scores = queries[begin : begin + 250] @ base.T
        near = np.argpartition(-scores, depth, axis=1)[:, :depth]
        order = np.argsort(-np.take_along_axis(scores, near, 1), axis=1)
        found.append(np.take_along_axis(near, order, 1))
    return np.concatenate(found)


def fused(*sides: Ranks) -> Ranks:
    """Rows by the sum of 1 / (CONSTANT + rank) over the sides, the best first."""
    depth = sides[0].shape[1]
    out = np.full((len(sides[0]), depth), -1, np.int64)
    for number in range(len(out)):
        scores: dict[int, float] = {}
        for side in sides:
            for rank, row in enumerate(side[number].tolist(), 1):
                if row >= 0:
                    scores[row] = scores.get(row, 0.0) + 1 / (CONSTANT + rank)
        best = sorted(scores, key=lambda row: -scores[row])[:depth]
        out[number, : len(best)] = best
    return out


def recall(found: Ranks, relevant: list[set[int]], k: int) -> float:
    return float(np.mean([bool(right & set(row[:k].tolist())) for row, right in zip(found, relevant, strict=True)]))


def normed(vectors: NDArray[Any]) -> NDArray[np.float32]:
    vectors = vectors.astype(np.float32)
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=5, help="one of so many questions is asked")
    parser.add_argument("--depth", type=int, default=50, help="rows of each side that are fused")
    parser.add_argument("--hashing", type=int, default=512, help="dimensions of the hashing embedder")
    parser.add_argument("--tokenizer", default="porter unicode61", help="of FTS5")
    args = parser.parse_args()
    data = args.data
    passages = list(lines(data / "text" / "squad11_passages.jsonl.gz"))
    rows = {one["id"]: row for row, one in enumerate(passages)}
    asked = list(lines(data / "text" / "squad11_questions_dev.jsonl.gz"))[:: args.every]
    questions = [one["question"] for one in asked]
    relevant = [{rows[name] for name in one["positive"] if name in rows} for one in asked]
    depth = args.depth
    begin = time.perf_counter()
    index = words_index(passages, args.tokenizer)
    built_s = time.perf_counter() - begin
    every_word, all_ms = by_words(index, questions, depth)
    words, took_ms = by_words(index, questions, depth, common_words(index, len(passages) // 10))
    hashing = Hashing(args.hashing)
    texts = [embedding_text(one["title"], one["text"]) for one in passages]
    vectors = {
        f"hashing-{args.hashing}": (normed(hashing.embed(texts, "passage")), normed(hashing.embed(questions, "query"))),
        "all-minilm-l6-v2": (
            normed(np.load(data / "ann" / "minilm-384-cosine.base.npy")[: len(passages)]),
            normed(load_embedder("all-minilm-l6-v2").embed(questions, "query")),
        ),
    }
    print(f"{len(passages):,} passages, {len(questions):,} questions, {depth} of each side, tokenizer {args.tokenizer}")
    print(f"FTS5 {sqlite3.sqlite_version}: built in {built_s:.1f} s. Processor time of a question, p50 and p99:")
    for name, took in (("all its words", all_ms), ("without those of more than a tenth of the passages", took_ms)):
        print(f"{name}: {np.percentile(took, 50):.1f} ms, {np.percentile(took, 99):.1f} ms")
    print()
    print("| | " + " | ".join(f"recall@{k}" for k in KS) + " |\n|---|" + "---|" * len(KS))
    told = {"BM25, all words": every_word, "BM25": words}
    for name, (base, queries) in vectors.items():
        near = by_vectors(base, queries, depth)
        told |= {name: near, f"{name} and BM25": fused(near, words)}
    for name, found in told.items():
        print(f"| {name} | " + " | ".join(f"{recall(found, relevant, k):.3f}" for k in KS) + " |")


if __name__ == "__main__":
    main()
