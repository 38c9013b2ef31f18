"""A writer killed at random times loses no acknowledged write. `--kills` sets the number of kills, and the seed."""

import random
import signal
from pathlib import Path

import pytest

from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment import CONTENTS
from tests.collections.small_collections import DIM, contents, document, open_writer
from tests.collections.writer_process import SEAL_ROWS, run
from tests.process_context import FORKSERVER

BACKGROUND_SHARE = 0.1  # of lives whose builds are processes, as a node's: these take seconds to start


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--kills"))


def test_a_killed_writer_loses_no_acknowledged_write_and_revives_no_deleted_document(
    tmp_path: Path, kills: int
) -> None:
    chance = random.Random(kills)
    directory = tmp_path / "collection"
    create(directory, DIM, metric="l2", degree=8)
    expected: dict[str, str] = {}
    sealed = acknowledged = 0
    for _ in range(kills):
        writes = [5, 20, 50, 100, 150, 600] if kills > 4 else [5, 10, 20, 25]
        lines = _run_and_kill(directory, chance.choice(writes), chance)
        held: dict[str, str] = {}
        possible = _after(expected, lines)
        acknowledged += lines.count("done\n")
        with open_writer(directory, seal_rows=SEAL_ROWS) as writer:
            held = contents(writer)
            sealed += len(writer.state.segments)
        assert held in possible
        with CollectionReader(directory) as reader:
            assert contents(reader) == held
        assert CollectionReader.verify(directory) == ""
        assert all((path / CONTENTS).exists() for path in (directory / "segments").iterdir())
        expected = held
    print(f"{kills} kills, {acknowledged} acknowledged writes, {sealed} segments found")  # shown with -s
    assert sealed, "no segment was ever sealed: the test is ineffective"


def _run_and_kill(directory: Path, writes: int, chance: random.Random) -> list[str]:
    reader, writer = FORKSERVER.Pipe(duplex=False)
    background = chance.random() < BACKGROUND_SHARE
    process = FORKSERVER.Process(target=run, args=(directory, chance.getrandbits(32), background, writer))
    process.start()
    writer.close()
    lines: list[str] = []
    with reader, open(reader.fileno(), closefd=False) as output:
        for line in output:
            lines.append(line)
            if line.startswith("done") and (writes := writes - 1) <= 0:
                break
        # Somewhere in the next write, or behind it.
        lines += [output.readline() for _ in range(chance.randint(0, 3))]
        process.kill()
        lines += output.readlines()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    return lines


def _after(before: dict[str, str], lines: list[str]) -> list[dict[str, str]]:
    """Return the possible contents: with and without the unacknowledged write."""
    held, begun = dict(before), dict(before)
    for line in lines:
        match line.split():
            case ["begin", "delete", _, *names]:
                begun = {name: text for name, text in held.items() if name not in names}
            case ["begin", "upsert", step, *names]:
                begun = held | {name: document(name, int(step) + int(name)).text for name in names}
            case ["done"]:
                held = begun
    return [held, begun]
