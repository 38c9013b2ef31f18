"""Traces of real services as arrivals: Azure (.csv), Mooncake and RAGPulse (.jsonl or .jsonl.gz).

The format is detected from the first line, not from the name. Every line is validated and every number is bounded; an
error names the file and the line.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from runtime.errors import ConfigError

MAX_REQUESTS = 5_000_000
MAX_TOKENS = 4_194_304
_MAX_LINE_CHARS = 1 << 20
_MAX_SECONDS = 366 * 86_400
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceError(ConfigError):
    """Raised if a trace cannot be read: missing, of an unknown format, or with an invalid line."""

    code = "trace_error"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds after the first one, prompt and answer tokens, and its prefix blocks.

    `prefix` contains chained block hashes, of `block_tokens` tokens each; 0: unknown. The first `known_blocks` precede
    the passages. A turn of a chat comes `chat_s` after its first one.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    block_tokens: int = 0
    known_blocks: int = MAX_TOKENS
    chat_s: float = 0.0


_MOONCAKE_BLOCK = 512  # tokens
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class _Mooncake(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0, le=_MAX_SECONDS * 1e3)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int] = []


class _RagPulse(msgspec.Struct):
    timestamp: str
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: dict[str, list[int]] = {}
    session_id: str = ""


def load_trace(path: Path, limit: int = MAX_REQUESTS) -> list[Arrival]:
    """Return the first `limit` requests of a trace by time; the first one is at 0 s. Raises `TraceError`."""
    try:
        arrivals = list(_read(path, min(limit, MAX_REQUESTS)))
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise TraceError(f"{path}: cannot read the trace: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: the trace is not UTF-8 text") from error
    if not arrivals:
        raise TraceError(f"{path}: the trace has no request")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    begin = arrivals[0].at_s
    return [replace(arrival, at_s=arrival.at_s - begin) for arrival in arrivals]


def at_rate(arrivals: list[Arrival], requests_per_s: float) -> list[Arrival]:
    """Return the same requests with time scaled to a mean rate of `requests_per_s`; order and bursts are kept.

    The turns of a chat keep their distances: chats begin more often, and people think no faster.
    """
    if requests_per_s <= 0:
        raise TraceError(f"a rate of {requests_per_s} requests/s: it must be over 0")
    factor = len(arrivals) / requests_per_s / max(arrivals[-1].at_s, 1e-9)
    scaled = [replace(arrival, at_s=(arrival.at_s - arrival.chat_s) * factor + arrival.chat_s) for arrival in arrivals]
    return sorted(scaled, key=lambda arrival: arrival.at_s)


def mean_rate(arrivals: list[Arrival]) -> float:
    """Return the mean requests/s of the trace."""
    return len(arrivals) / max(arrivals[-1].at_s, 1e-9)


def _read(path: Path, limit: int) -> Iterator[Arrival]:
    lines = _lines(path)
    first = next(lines, "")
    if first.strip() == _AZURE_HEADER:
        parse, begin = _azure, 2
    else:
        parse, begin = _json_kind(path, first), 1
        lines = chain((first,), lines)
    for number, line in islice(enumerate(lines, begin), limit):
        try:
            yield parse(line)
        except (ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
            raise TraceError(f"{path}:{number}: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE_CHARS), ""), 1):
            if len(line) == _MAX_LINE_CHARS:
                raise TraceError(f"{path}:{number}: a line of over {_MAX_LINE_CHARS} characters")
            if line.strip():
                yield line


def _json_kind(path: Path, line: str) -> Any:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError:
        row = None
    if isinstance(row, dict) and "input_length" in row:
        return RagPulse(path.parent).parse if isinstance(row.get("hash_ids"), dict) else _mooncake
    raise TraceError(f"{path}: not a trace: the first line is neither {_AZURE_HEADER!r} nor JSON with input_length")


def _azure(line: str) -> Arrival:
    stamp, prompt, output = line.strip().split(",")
    moment = datetime.fromisoformat(stamp[:26])  # the trace has seven digits of a second, Python six
    return _arrival(moment.timestamp(), _tokens(prompt), _tokens(output))


def _tokens(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{value} tokens: expected 0 to {MAX_TOKENS}")
    return value


def _mooncake(line: str) -> Arrival:
    row = msgspec.json.decode(line, type=_Mooncake)
    return _arrival(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids, _MOONCAKE_BLOCK)


class _Chat:
    """The turns of a chat so far: questions and answers, with their tokens."""

    def __init__(self, begin_s: float) -> None:
        self.begin_s = self.last_s = begin_s
        self.turns: list[tuple[int, int]] = []


class RagPulse:
    """RAGPulse's requests as prompts of this node, if the tokens of their parts are in files beside the trace.

    The turns of a session are a chat then, which the trace's own histories are not (they share no beginning): a
    prompt has the parts of the system prompt that other requests have too, the questions and answers of the earlier
    turns, the other parts of the system prompt, passages, web pages, and the question, in blocks of 32 tokens. Without
    these files the prompts have the trace's lengths, and their parts are blocks of unknown length.
    """

    _BLOCK = 32
    _PAUSE_S = 300.0  # after which a session's next turn begins another chat
    _PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")

    def __init__(self, directory: Path) -> None:
        self._tokens: dict[int, int] = {}  # part → its tokens; ids of different kinds differ
        for number, name in enumerate(("sys_prompt", "passages", "history", "user_input", "web_search"), 1):
            path = next((one for one in sorted(directory.glob(f"{number}_{name}.jsonl*")) if one.is_file()), None)
            for at, line in enumerate(_lines(path) if path else (), 1):
                try:
                    part, tokens = msgspec.json.decode(line, type=dict[str, _Tokens]).values()
                except ValueError as error:
                    raise TraceError(f"{path}:{at}: {error}") from error
                self._tokens[part] = tokens
        self._chats: dict[str, _Chat] = {}  # by session
        self._seen: set[int] = set()
        self._answers = 0

    def parse(self, line: str) -> Arrival:
        """Return the next request."""
        row = msgspec.json.decode(line, type=_RagPulse)
        at_s = float(row.timestamp)
        if not 0 <= at_s <= _MAX_SECONDS:
            raise ValueError(f"timestamp {row.timestamp!r}: expected 0 to {_MAX_SECONDS} s")
        system, passages, history, web, question = (row.hash_ids.get(part, ()) for part in self._PARTS)
        if not self._tokens:
            return _arrival(at_s, row.input_length, row.output_length, (*system, *passages, *history, *web, *question))
        chat = self._chats.get(row.session_id)
        if chat is None or not 0 <= at_s - chat.last_s <= self._PAUSE_S:
            chat = self._chats[row.session_id] = _Chat(at_s)
        chat.last_s = at_s
        own = [part for part in system[1:] if part not in self._seen]  # a first request's may be others' too
        self._seen.update(system)
        shared = [part for part in system if part not in own]
        before = [*self._sized(shared), *chat.turns]
        parts = [*before, *self._sized([*own, *passages, *web, *question])]
        self._answers += 1
        chat.turns += [*self._sized(question), (-self._answers, max(row.output_length, 1))]
        arrival = _arrival(
            at_s, sum(tokens for _, tokens in parts), row.output_length, self._blocks(parts), self._BLOCK
        )
        known = sum(tokens for _, tokens in before) // self._BLOCK
        return replace(arrival, known_blocks=known, chat_s=at_s - chat.begin_s)

    def _sized(self, parts: Sequence[int]) -> list[tuple[int, int]]:
        return [(part, self._tokens.get(part, 0)) for part in parts]

    def _blocks(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        """Return hashes of the full blocks' contents: which tokens of which parts they have."""
        hashes: list[int] = []
        content: list[tuple[int, int, int]] = []
        room = self._BLOCK
        for part, tokens in parts:
            at = 0
            while at < tokens:
                taken = min(room, tokens - at)
                content.append((part, at, taken))
                at, room = at + taken, room - taken
                if not room:
                    hashes.append(hash(tuple(content)))
                    content, room = [], self._BLOCK
        return hashes


def _arrival(at_s: float, prompt: int, output: int, hashes: Sequence[int] = (), block_tokens: int = 0) -> Arrival:
    """Treat 0 prompt or answer tokens as 1: a model needs at least one and generates at least one."""
    chain = 0
    prefix = []
    for block in hashes:
        chain = hash((chain, block))  # of integers: the same in every process
        prefix.append(chain)
    return Arrival(at_s, max(prompt, 1), max(output, 1), tuple(prefix), block_tokens)
