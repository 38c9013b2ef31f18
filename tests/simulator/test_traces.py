"""Tests of traces: every format is parsed, and errors name their line."""

import gzip
from pathlib import Path

import pytest

from runtime.simulator.traces import TraceError, at_rate, load_trace, mean_rate

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 500, "input_length": 7, "output_length": 0, "hash_ids": [0, 1, 9]}
"""
RAGPULSE = """{"timestamp": "82", "input_length": 3112, "output_length": 192, "hash_ids": {"sys_prompt": [8302], "user_input": [5]}, "session_id": "x"}
{"timestamp": "93", "input_length": 3167, "output_length": 86, "hash_ids": {"sys_prompt": [8302], "user_input": [6]}, "session_id": "x"}
"""  # noqa: E501


def written(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_an_azure_trace_starts_at_0_and_keeps_its_gaps(tmp_path: Path) -> None:
    first, second = load_trace(written(tmp_path, AZURE))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)


def test_a_mooncake_trace_is_sorted_and_its_blocks_become_chained_prefixes(tmp_path: Path) -> None:
    first, second = load_trace(written(tmp_path, MOONCAKE, "trace.jsonl.gz"))
    assert (first.prompt_tokens, first.output_tokens) == (7, 1)  # an answer has at least one token
    assert second.at_s == 0.5
    assert first.prefix[:2] == second.prefix[:2]
    assert first.prefix[2] != second.prefix[2]
    assert first.block_tokens == 512


def test_a_ragpulse_trace_has_its_times_as_text_and_its_blocks_by_part(tmp_path: Path) -> None:
    first, second = load_trace(written(tmp_path, RAGPULSE))
    assert (second.at_s, second.prompt_tokens) == (11, 3167)
    assert first.prefix[0] == second.prefix[0]
    assert first.prefix[1] != second.prefix[1]


def test_a_ragpulse_trace_beside_its_parts_becomes_chats_in_blocks_of_tokens(tmp_path: Path) -> None:
    sizes = {"1_sys_prompt": {1: 64, 2: 64, 3: 20}, "2_passages": {5: 100}, "4_user_input": {8: 30, 9: 34}}
    for name, parts in sizes.items():
        lines = (f'{{"{name[2:]}_id": {part}, "token_length": {tokens}}}\n' for part, tokens in parts.items())
        written(tmp_path, "".join(lines), f"{name}.jsonl.gz")

    def line(at_s: int, system: list[int], question: int, session: str) -> str:
        ids = f'{{"sys_prompt": {system}, "passages_ids": [5], "user_input": [{question}]}}'
        return f'{{"timestamp": "{at_s}", "input_length": 1, "output_length": 32, "hash_ids": {ids}, "session_id": "{session}"}}\n'  # noqa: E501

    turns = line(0, [1, 2], 8, "a") + line(10, [1, 2, 3], 9, "a") + line(11, [1, 2], 9, "b") + line(900, [1], 8, "a")
    first, second, other, later = load_trace(written(tmp_path, turns))
    assert [one.prompt_tokens for one in (first, second, other)] == [258, 128 + 62 + 20 + 134, 262]
    assert first.block_tokens == 32
    assert [one.known_blocks for one in (first, second, other)] == [2, (128 + 62) // 32, 4]
    assert second.prefix[:4] == other.prefix[:4], "the system prompt"
    assert second.prefix[4] != other.prefix[4], "the first turn, before the passages"
    assert (second.chat_s, other.chat_s, later.chat_s) == (10, 0, 0)
    faster = at_rate([first, second, other, later], 400.0)
    assert [round(one.at_s, 3) for one in faster] == [0.0, 0.0 + round(11 / 90_000, 3), 0.01, 10.0]


@pytest.mark.parametrize("line", ['{"id": 2}', "nonsense", '{"id": 2, "token_length": -1}'])
def test_an_invalid_line_of_ragpulses_parts_is_named(tmp_path: Path, line: str) -> None:
    written(tmp_path, f'{{"id": 1, "token_length": 5}}\n{line}\n', "2_passages.jsonl")
    with pytest.raises(TraceError, match=r"2_passages\.jsonl:2"):
        load_trace(written(tmp_path, RAGPULSE))


def test_a_rate_only_rescales_time(tmp_path: Path) -> None:
    arrivals = load_trace(written(tmp_path, AZURE))
    faster = at_rate(arrivals, 10.0)
    assert mean_rate(faster) == pytest.approx(10.0)
    assert [a.prompt_tokens for a in faster] == [a.prompt_tokens for a in arrivals]


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    assert len(load_trace(written(tmp_path, AZURE + "nonsense\n"), limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a trace"),
        ("hello\n", "not a trace"),
        ("[1]\n", "not a trace"),
        (AZURE.splitlines()[0] + "\n", "no request"),
        (AZURE + "2023-11-16 18:15:51,-5,1\n", r"trace:4: -5 tokens"),
        (AZURE + "2023-11-16 18:15:51,99999999999,1\n", r"trace:4: 99999999999 tokens"),
        (AZURE + "yesterday,1,1\n", "trace:4"),
        (AZURE + "1,2\n", "trace:4"),
        (MOONCAKE + '{"timestamp": -1, "input_length": 1, "output_length": 1}\n', "trace:3.*timestamp"),
        (MOONCAKE + '{"timestamp": 1}\n', "trace:3.*input_length"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1e99, "output_length": 1}\n', "trace:3"),
        (RAGPULSE + '{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": {}}\n', "trace:3"),
        (RAGPULSE + '{"timestamp": "nan", "input_length": 1, "output_length": 1, "hash_ids": {}}\n', "trace:3"),
        (AZURE + "1" * 1_100_000, "over 1048576 characters"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_trace(written(tmp_path, text))


def test_a_missing_damaged_or_non_text_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        load_trace(tmp_path / "none.csv")
    damaged = tmp_path / "trace.csv.gz"
    damaged.write_bytes(gzip.compress(AZURE.encode() * 100)[:60])
    with pytest.raises(TraceError, match="cannot read"):
        load_trace(damaged)
    damaged.write_bytes(b"plain")
    with pytest.raises(TraceError, match="cannot read"):
        load_trace(damaged)
    binary = tmp_path / "trace.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        load_trace(binary)
