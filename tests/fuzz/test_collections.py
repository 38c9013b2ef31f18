"""Fuzz tests of collection files: damage gives the correct answer or a typed error, never a crash or a wild read."""

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.fuzz.budget import fuzzed
from tests.fuzz.collections import SIZE, Damage, Trap, build_all, copied, damages, reseal

HANG_S = 240.0  # bounds a hang; the first answers include compiling the search


class Searcher:
    """The searcher process, restarted when it has exited."""

    def __init__(self, good: list[Path]) -> None:
        self._good = good
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.searcher", *map(str, self._good)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.right = [self._readline() for _ in self._good]

    def _readline(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], HANG_S)[0]:
            self.close()
            return {"fault": "it hangs"}
        line = self._process.stdout.readline()
        if not line:
            return {"fault": f"it ended with {self._process.wait(HANG_S)}"}
        heard: dict[str, Any] = json.loads(line)
        return heard

    def ask(self, directory: Path) -> dict[str, Any]:
        """Return the outcome of opening, searching and verifying a collection."""
        if self._process.poll() is not None:
            self._start()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(str(directory)).encode() + b"\n")
        self._process.stdin.flush()
        return self._readline()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build_all(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def searcher(good: list[Path]) -> Iterator[Searcher]:
    made = Searcher(good)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad") / "docs"


def expect_typed(found: dict[str, Any], right: dict[str, Any], ids: set[int] | None) -> None:
    assert "fault" not in found, found["fault"]
    if "refused" not in found and ids is not None:
        assert {i for row in found["answer"] for i in row} <= ids | {-1}
        assert len(found["answer"]) == len(right["answer"])


def test_a_good_collection_is_verified_and_searched(good: list[Path], searcher: Searcher) -> None:
    for directory, right in zip(good, searcher.right, strict=True):
        assert right["verified"], right
        assert searcher.ask(directory) == right


@fuzzed()
@given(kind=st.integers(0, 2), damage=damages())
def test_a_damaged_collection_is_rejected_or_answers_with_its_own_ids(
    good: list[Path], searcher: Searcher, bad: Path, kind: int, damage: Damage
) -> None:
    copied(good[kind], bad)
    ids_file = bad / "segments/0/index/ids.npy"
    before = ids_file.read_bytes() if ids_file.exists() else b""
    damage(bad)
    found = searcher.ask(bad)
    event(found.get("refused", f"answered, verified: {found.get('verified')}"))
    own = {n * 3 for n in range(SIZE)} if kind == 1 else set(range(SIZE))
    same = not before or (ids_file.is_file() and ids_file.read_bytes() == before)
    expect_typed(found, searcher.right[kind], own if same and kind != 2 else None)


@fuzzed()
@given(kind=st.integers(0, 2), number=st.integers(0, 100), where=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_verify_detects_a_flipped_bit_anywhere(
    good: list[Path], searcher: Searcher, bad: Path, kind: int, number: int, where: int, bit: int
) -> None:
    copied(good[kind], bad)
    # An empty log has only a header, which a writer makes again; a lock has no content that counts.
    files = sorted(path for path in bad.rglob("*") if path.is_file() and path.suffix not in (".log", ".lock"))
    path = files[number % len(files)]
    content = bytearray(path.read_bytes())
    content[where % len(content)] ^= 1 << bit
    path.write_bytes(content)
    found = searcher.ask(bad)
    assert "fault" not in found, found["fault"]
    assert "refused" in found or not found["verified"] or found == searcher.right[kind]
    assert path.name in found["message"] or bad.name in found["message"]


def test_a_pickled_array_is_never_unpickled(good: list[Path], searcher: Searcher, bad: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    for name in ("codes", "graph", "seeds", "centre", "ids"):
        copied(good[1], bad)
        np.save(bad / f"segments/0/index/{name}.npy", np.array([Trap(trap)] * SIZE), allow_pickle=True)
        reseal(bad, whole=True)
        assert searcher.ask(bad)["refused"] == "CollectionError"
    assert not trap.exists()
