"""Merged reading of a node's logs: ordered, and over rotations."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from launchers.main import command_line
from runtime.errors import EXIT_FAILED, InvalidRequest
from runtime.node.logs.log import LogFile, LogLine
from runtime.node.logs.reader import read_logs
from runtime.node.run_dir import NodeInfo, RunDir


def line(second: int, process: str = "pool-0", **more: str) -> LogLine:
    fields = {"level": "info", "event": f"event {second}"} | more
    return LogLine(time=f"2026-01-01T00:00:{second:02}.000000Z", process=process, pid=1, **fields)


class Writer:
    """The log of one process."""

    def __init__(self, directory: Path, process: str, max_bytes: int = 1 << 20) -> None:
        self.process = process
        self._file = LogFile(directory / f"{process}.log", max_bytes)

    def write(self, second: int, **more: str) -> None:
        self._file.write(msgspec.json.encode(line(second, self.process, **more)) + b"\n")

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def pool(tmp_path: Path) -> Writer:
    return Writer(tmp_path, "pool-0")


def seconds(lines: list[LogLine]) -> list[int]:
    return [int(found.time[17:19]) for found in lines]


def test_lines_of_all_processes_are_merged_by_time(tmp_path: Path, pool: Writer) -> None:
    decode = Writer(tmp_path, "decode-0")
    for second in (1, 4, 5):
        pool.write(second)
    for second in (0, 2, 3, 6):
        decode.write(second)
    assert seconds(list(read_logs(tmp_path))) == list(range(7))


def test_partial_and_invalid_lines_are_skipped(tmp_path: Path, pool: Writer) -> None:
    (tmp_path / "pool-0.log").write_bytes(b'half a line\n{"time": 3}\n\xff\xfe\n')
    pool.write(1)
    with (tmp_path / "pool-0.log").open("ab") as file:
        file.write(msgspec.json.encode(line(2))[:20])
    assert seconds(list(read_logs(tmp_path))) == [1]


def test_a_rotated_file_is_read_before_the_current_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "pool-0", max_bytes=250)
    for second in range(3):
        writer.write(second)
    assert (tmp_path / "pool-0.log.1").exists()
    assert seconds(list(read_logs(tmp_path))) == [0, 1, 2]


# ---- the command


def trinity_logs(*arguments: str) -> str:
    run = CliRunner().invoke(command_line(), ["logs", *arguments])
    if run.exception is not None:
        raise run.exception
    return run.stdout


@pytest.fixture
def node(tmp_path: Path) -> str:
    """The run directory of a node that was killed."""
    logs = tmp_path / "run" / "logs"
    decode, supervisor = Writer(logs, "decode-0"), Writer(logs, "supervisor")
    supervisor.write(0)
    decode.write(1, request="cmpl-1", level="warning")
    decode.write(2, request="cmpl-12")
    decode.write(3, level="error")
    decode.write(4, request="cmpl-1~2")
    return str(tmp_path / "run")


def events(text: str) -> list[int]:
    return [int(found.rsplit(" ", 1)[1]) for found in text.splitlines()]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--worker", "decode-0"], [1, 2, 3, 4]),
        (["--request", "cmpl-1"], [1, 4]),
        (["--level", "warning"], [1, 3]),
        (["--worker", "decode-0", "--level", "error"], [3]),
    ],
)
def test_the_command_filters_by_process_request_and_level(node: str, options: list[str], wanted: list[int]) -> None:
    assert events(trinity_logs(node, *options)) == wanted


def test_an_unknown_process_is_refused_with_the_known_ones(node: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--worker pool-9: .* has logs of decode-0, supervisor") as refused:
        trinity_logs(node, "--worker", "pool-9")
    assert refused.value.exit_code == EXIT_FAILED  # as of `restart --worker`


def test_a_node_removes_the_logs_of_its_run_directory(tmp_path: Path) -> None:
    held = RunDir.acquire(tmp_path / "run")
    held.write(NodeInfo("n", 1, "", "", (), (), logs=str(tmp_path / "run" / "logs")))
    Writer(tmp_path / "run" / "logs", "pool-0", max_bytes=1).write(1)
    held.release()
    assert not (tmp_path / "run").exists()


def test_only_regular_files_are_read(tmp_path: Path, pool: Writer) -> None:
    (tmp_path / "endless.log").symlink_to("/dev/zero")
    pool.write(1)
    assert seconds(list(read_logs(tmp_path))) == [1]
