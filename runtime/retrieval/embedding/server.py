"""Embedder behind a server with OpenAI's `/v1/embeddings`: batches, retries."""

import math
import random
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import httpx
import msgspec
import numpy as np

from runtime.errors import EmbedderFailed, EmbedderUnreachable
from runtime.retrieval.embedding.embedder import (
    MAX_DIM,
    SENT,
    SERVER_CONCURRENCY,
    ServerSpec,
    TextKind,
    Vectors,
    embedder_name,
    normalize,
    truncate_text,
)

BATCH_TEXTS, BATCH_CHARACTERS = SENT
MAX_TOKENS = 8192
_CONNECT_S = 5.0
_NUMBER_BYTES = 32  # longest text form of a component
_MAX_COMPONENT = 1e18  # its square is still a float32
_RETRYABLE_STATUS = (408, 409, 425, 429, 500, 502, 503, 504, 529)


@dataclass(frozen=True)
class RetryPolicy:
    """Maximum attempts, timeout of each, and maximum back-off between two."""

    attempts: int
    timeout_s: float
    max_backoff_s: float


REQUEST_RETRIES = RetryPolicy(2, 5.0, 2.0)  # a user's request waits
BUILD_RETRIES = RetryPolicy(6, 120.0, 120.0)


class _Vector(msgspec.Struct):
    index: int
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Vector]


_decode = msgspec.json.Decoder(_Answer).decode


class ServerEmbedder:
    """An embedder behind a URL. `key`: sent as a bearer token, "" for none.

    `dim` 0 in the spec: the dimension of the first response, to which all later ones must conform.
    """

    max_tokens = MAX_TOKENS
    max_concurrency = SERVER_CONCURRENCY
    turn = SENT
    tokenizing = None

    def __init__(
        self,
        spec: ServerSpec,
        *,
        key: str = "",
        url: str = "",
        retries: RetryPolicy = REQUEST_RETRIES,
        sleep: Callable[[float], None] = time.sleep,
        jitter: random.Random | None = None,
    ) -> None:
        """`url`: replaces the URL of the spec."""
        self.name = embedder_name(spec)
        self.dim = spec.dim
        self._spec = spec
        self._url = (url or spec.url).rstrip("/")
        self._retries = retries
        self._sleep, self._jitter = sleep, jitter or random.Random()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=_CONNECT_S))
        weakref.finalize(self, self._client.close)  # embedders are dropped, not closed

    def count_tokens(self, text: str) -> int:
        """See `Embedder.count_tokens`: without a tokenizer, counts four bytes as a token."""
        return -(-len(truncate_text(text).encode()) // 4)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """See `Embedder.embed`."""
        prefix = self._spec.query_prefix if kind == "query" else self._spec.passage_prefix
        batches = _batches([prefix + truncate_text(text) or " " for text in texts])  # many servers refuse an empty text
        vectors = [self._embedded(batch) for batch in batches]
        return np.concatenate(vectors) if vectors else np.empty((0, self.dim), np.float32)

    def _embedded(self, texts: list[str]) -> Vectors:
        """Return one batch's vectors; retries with exponential back-off and jitter."""
        policy = self._retries
        for attempt in range(1, policy.attempts + 1):
            try:
                return self._request(texts)
            except _Retryable as failure:
                wait_s = failure.retry_after_s
                if wait_s is None:
                    wait_s = 0.5 * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.5)
                if attempt == policy.attempts or wait_s > policy.max_backoff_s:
                    raise failure.error from failure
            self._sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _request(self, texts: list[str]) -> Vectors:
        """Send one request. Raises `_Retryable`, or `EmbedderFailed` if a retry would fail alike."""
        body = {"model": self._spec.name, "input": texts, "encoding_format": "float"}
        limit = len(texts) * ((self.dim or MAX_DIM) * _NUMBER_BYTES + 1024) + (1 << 16)
        try:
            timeout = httpx.Timeout(self._retries.timeout_s, connect=_CONNECT_S)
            with self._client.stream("POST", f"{self._url}/embeddings", json=body, timeout=timeout) as response:
                content = bytearray()
                for part in response.iter_bytes():
                    content += part
                    if len(content) > limit:
                        raise EmbedderFailed(f"{self._url} sent a response of more than {limit:,} bytes")
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise _Retryable(EmbedderUnreachable(f"{self._url} does not answer: {reason}")) from error
        if response.status_code != 200:
            message = f"{self._url} responded with {response.status_code}: {_error_message(bytes(content))}"
            if response.status_code in _RETRYABLE_STATUS:
                raise _Retryable(EmbedderUnreachable(message), _retry_after(response))
            raise EmbedderFailed(message)
        return self._vectors(bytes(content), len(texts))

    def _vectors(self, content: bytes, count: int) -> Vectors:
        try:
            data = sorted(_decode(content).data, key=lambda vector: vector.index)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EmbedderFailed(f"{self._url} sent a response that is not a list of embeddings: {error}") from error
        if [vector.index for vector in data] != list(range(count)):
            raise EmbedderFailed(f"{self._url} sent {len(data)} vectors for {count} texts, or wrong indexes")
        lengths = {len(vector.embedding) for vector in data}
        dim = self.dim or min(lengths)
        if lengths != {dim} or not 1 <= dim <= MAX_DIM:
            raise EmbedderFailed(
                f"{self._url}: {self._spec.name} returns vectors of {max(lengths)} dimensions"
                + (f", the collection's have {self.dim}" if self.dim else f", the limits are 1 and {MAX_DIM}")
            )
        numbers = np.fromiter(chain.from_iterable(vector.embedding for vector in data), np.float64, count * dim)
        if not (np.abs(numbers) < _MAX_COMPONENT).all():  # false for NaN too
            raise EmbedderFailed(f"{self._url}: {self._spec.name} returns values beyond float32")
        return normalize(numbers.reshape(count, dim).astype(np.float32))


class _Retryable(Exception):
    """A failure after which a retry is useful; `retry_after_s`: the server's Retry-After."""

    def __init__(self, error: EmbedderUnreachable, retry_after_s: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after_s = retry_after_s


def _batches(texts: list[str]) -> list[list[str]]:
    """Split texts, in order, into batches of bounded count and characters (a longer text is a batch of its own)."""
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
    """Return the Retry-After header in seconds; None if it is missing or a date."""
    try:
        wait_s = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return wait_s if math.isfinite(wait_s) and wait_s >= 0 else None


def _error_message(content: bytes) -> str:
    """Return an error response's message, shortened: from OpenAI's error object, or the text."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])[:256]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return repr(content[:256].decode(errors="replace"))
