"""A reranker behind a server with the route that vLLM, Jina and Cohere share: `POST …/rerank`."""

import math
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
import msgspec

from runtime.errors import DeadlineExceeded, RerankerFailed, RerankerUnreachable
from runtime.retrieval.embedding.embedder import SERVER_CONCURRENCY, truncate_text
from runtime.retrieval.reranking.reranker import Batch, Scored

_CONNECT_S = 5.0
_RESULT_BYTES = 1024  # of one result, besides the text that it may repeat
_ESCAPED = 6  # bytes of a byte of text that is escaped
_RETRYABLE_STATUS = (408, 409, 425, 429, 500, 502, 503, 504, 529)


class _Result(msgspec.Struct):
    index: int
    relevance_score: float


class _Answer(msgspec.Struct):
    results: list[_Result]
    usage: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class RerankServer:
    """A server at a URL, with its name for the model. `key`: sent as a bearer token, "" for none."""

    max_concurrency = SERVER_CONCURRENCY

    def __init__(self, name: str, url: str, key: str = "") -> None:
        self.name, self._url = name, f"{url.rstrip('/')}/rerank"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers)
        weakref.finalize(self, self._client.close)

    def batches(self, query: str, texts: Sequence[str]) -> Sequence[Batch]:
        """See `Reranker.batches`: one request."""
        documents = [truncate_text(text) or " " for text in texts]  # many servers refuse an empty text
        body = {"model": self.name, "query": truncate_text(query), "documents": documents, "top_n": len(documents)}
        return [Batch(range(len(texts)), partial(self._score, msgspec.json.encode(body), len(texts)))]

    def _score(self, body: bytes, count: int, until_ns: int) -> Scored:
        """Send a request, and once more over a new connection if the server has closed an idle one."""
        for attempt in (1, 2):
            try:
                status, content = self._request(body, _ESCAPED * len(body) + count * _RESULT_BYTES, until_ns)
                break
            except httpx.TimeoutException as error:
                raise DeadlineExceeded(f"{self._url} did not answer in time") from error
            except httpx.HTTPError as error:
                if attempt == 2 or isinstance(error, httpx.ConnectError):
                    reason = str(error) or type(error).__name__
                    raise RerankerUnreachable(f"{self._url} does not answer: {reason}") from error
        if status != 200:
            failure = RerankerUnreachable if status in _RETRYABLE_STATUS else RerankerFailed
            raise failure(f"{self._url} responded with {status}: {content[:256].decode(errors='replace')!r}")
        return self._scored(content, count)

    def _request(self, body: bytes, limit: int, until_ns: int) -> tuple[int, bytes]:
        """Return status and body of the response. Raises httpx's errors, `DeadlineExceeded`, `RerankerFailed`."""
        left_s = max((until_ns - time.monotonic_ns()) / 1e9, 1e-3)
        timeout = httpx.Timeout(left_s, connect=min(left_s, _CONNECT_S))
        headers = {"Content-Type": "application/json"}
        with self._client.stream("POST", self._url, content=body, headers=headers, timeout=timeout) as response:
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > limit:
                    raise RerankerFailed(f"{self._url} sent a response of more than {limit:,} bytes")
                if time.monotonic_ns() > until_ns:
                    raise DeadlineExceeded(f"{self._url} did not answer in time")
        return response.status_code, bytes(content)

    def _scored(self, content: bytes, count: int) -> Scored:
        try:
            answer = _decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RerankerFailed(f"{self._url} sent a response that is not a list of results: {error}") from error
        scores = {result.index: result.relevance_score for result in answer.results}
        if len(answer.results) != count or scores.keys() != set(range(count)):
            raise RerankerFailed(f"{self._url} sent {len(answer.results)} results for {count} texts, or wrong indexes")
        if not all(map(math.isfinite, scores.values())):
            raise RerankerFailed(f"{self._url} returns scores that are not finite")
        tokens = (answer.usage or {}).get("total_tokens")
        counted = tokens if isinstance(tokens, int) and 0 <= tokens < 1 << 53 else 0
        return Scored([scores[row] for row in range(count)], counted)
