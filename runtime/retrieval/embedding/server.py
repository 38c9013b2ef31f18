"""Texts to vectors by a server with OpenAI's `/v1/embeddings`: in batches, several at once, tried again when that may
help."""

import math
import random
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import httpx
import msgspec
import numpy as np

from runtime.errors import EmbedderFailed, EmbedderUnreachable
from runtime.retrieval.embedding.embedder import (
    MAX_DIM,
    SERVER_AT_ONCE,
    ServerSpec,
    TextKind,
    Vectors,
    embedder_name,
    normalize,
    truncate_text,
)

BATCH_TEXTS, BATCH_CHARACTERS = 64, 65_536
MAX_TOKENS = 8192
_CONNECT_S = 5.0
_NUMBER_BYTES = 32  # the most that a number of a vector takes as text
_BEYOND = 1e18  # its square is still a float32
_RETRYABLE_STATUS = (408, 409, 425, 429, 500, 502, 503, 504, 529)


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is sent at most, how long each may take, and how long the next is waited for at most."""

    attempts: int
    timeout_s: float
    most_wait_s: float


REQUEST_RETRIES = RetryPolicy(2, 5.0, 2.0)  # somebody waits for it
BUILD_RETRIES = RetryPolicy(6, 120.0, 120.0)


class _Vector(msgspec.Struct):
    index: int
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Vector]


_decode = msgspec.json.Decoder(_Answer).decode


class ServerEmbedder:
    """An embedder behind a URL. `key`: sent as a bearer token, "" for none.

    `dim` 0 in the spec: as many as the first answer has. Any other number of values is refused then.
    """

    max_tokens = MAX_TOKENS
    at_once = SERVER_AT_ONCE

    def __init__(
        self,
        spec: ServerSpec,
        *,
        key: str = "",
        threads: int = 1,
        url: str = "",
        patience: RetryPolicy = REQUEST_RETRIES,
        sleep: Callable[[float], None] = time.sleep,
        jitter: random.Random | None = None,
    ) -> None:
        """`url`: where the server is, if not where the spec says."""
        self.name = embedder_name(spec)
        self.dim = spec.dim
        self._spec = spec
        self._url = (url or spec.url).rstrip("/")
        self._in_flight = min(threads, SERVER_AT_ONCE)
        self._patience = patience
        self._sleep, self._jitter = sleep, jitter or random.Random()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=_CONNECT_S))
        weakref.finalize(self, self._client.close)  # embedders are dropped, not closed

    def count_tokens(self, text: str) -> int:
        """See `Embedder.count_tokens`: there is no tokenizer here, so bytes are counted, four a token."""
        return -(-len(truncate_text(text).encode()) // 4)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """See `Embedder.embed`."""
        prefix = self._spec.query_prefix if kind == "query" else self._spec.passage_prefix
        batches = _batches([prefix + truncate_text(text) or " " for text in texts])  # an empty text is refused by many
        if self._in_flight == 1 or len(batches) == 1:
            found = [self._embedded(batch) for batch in batches]
        else:
            with ThreadPoolExecutor(self._in_flight) as pool:
                found = list(pool.map(self._embedded, batches))
        return np.concatenate(found) if found else np.empty((0, self.dim), np.float32)

    def _embedded(self, texts: list[str]) -> Vectors:
        """One batch's, asked for until it is answered or there is no use in that."""
        patience = self._patience
        for attempt in range(1, patience.attempts + 1):
            try:
                return self._asked(texts)
            except _Retryable as trouble:
                wait_s = trouble.after_s
                if wait_s is None:
                    wait_s = 0.5 * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.5)
                if attempt == patience.attempts or wait_s > patience.most_wait_s:
                    raise trouble.error from trouble
            self._sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _asked(self, texts: list[str]) -> Vectors:
        """One request. Raises `_Retryable`, or `EmbedderFailed` for what would be answered alike again."""
        body = {"model": self._spec.name, "input": texts, "encoding_format": "float"}
        limit = len(texts) * ((self.dim or MAX_DIM) * _NUMBER_BYTES + 1024) + (1 << 16)
        try:
            timeout = httpx.Timeout(self._patience.timeout_s, connect=_CONNECT_S)
            with self._client.stream("POST", f"{self._url}/embeddings", json=body, timeout=timeout) as response:
                content = bytearray()
                for part in response.iter_bytes():
                    content += part
                    if len(content) > limit:
                        raise EmbedderFailed(f"{self._url} answers with more than {limit:,} bytes")
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise _Retryable(EmbedderUnreachable(f"{self._url} does not answer: {reason}")) from error
        if response.status_code != 200:
            told = f"{self._url} answers with {response.status_code}: {_error_message(bytes(content))}"
            if response.status_code in _RETRYABLE_STATUS:
                raise _Retryable(EmbedderUnreachable(told), _retry_after(response))
            raise EmbedderFailed(told)
        return self._vectors(bytes(content), len(texts))

    def _vectors(self, content: bytes, count: int) -> Vectors:
        try:
            data = sorted(_decode(content).data, key=lambda vector: vector.index)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EmbedderFailed(f"{self._url} answers with what are no embeddings: {error}") from error
        if [vector.index for vector in data] != list(range(count)):
            raise EmbedderFailed(f"{self._url} answers with {len(data)} vectors for {count} texts, or with others'")
        lengths = {len(vector.embedding) for vector in data}
        wanted = self.dim or min(lengths)
        if lengths != {wanted} or not 1 <= wanted <= MAX_DIM:
            raise EmbedderFailed(
                f"{self._url}: {self._spec.name} gives vectors of {max(lengths)} dimensions"
                + (f", the collection's have {self.dim}" if self.dim else f", the limits are 1 and {MAX_DIM}")
            )
        numbers = np.fromiter(chain.from_iterable(vector.embedding for vector in data), np.float64, count * wanted)
        if not (np.abs(numbers) < _BEYOND).all():  # and NaN is not below it
            raise EmbedderFailed(f"{self._url}: {self._spec.name} gives values beyond float32")
        return normalize(numbers.reshape(count, wanted).astype(np.float32))


class _Retryable(Exception):
    """What may go well at another time; `after_s` is when the server says so."""

    def __init__(self, error: EmbedderUnreachable, after_s: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.after_s = after_s


def _batches(texts: list[str]) -> list[list[str]]:
    """In their order, each of so many texts and characters at most (a longer text is alone)."""
    batches: list[list[str]] = []
    characters = 0
    for text in texts:
        characters += len(text)
        if batches and len(batches[-1]) < BATCH_TEXTS and characters <= BATCH_CHARACTERS:
            batches[-1].append(text)
        else:
            batches.append([text])
            characters = len(text)
    return batches


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds; None where the server says nothing, or a date."""
    try:
        wait_s = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return wait_s if math.isfinite(wait_s) and wait_s >= 0 else None


def _error_message(content: bytes) -> str:
    """What an error says of itself, shortened: OpenAI's object, or text."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])[:256]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return repr(content[:256].decode(errors="replace"))
