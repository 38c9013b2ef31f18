"""Probes of one answer: searches of the vector pool during generation."""

import asyncio
import time
from collections.abc import Callable, Sequence, Set

from runtime.engines.openai.assembly import Fitted, fit, inserted_text
from runtime.engines.openai.capabilities import tokenize
from runtime.engines.openai.server import Server
from runtime.errors import DeadlineExceeded, TrinityError
from runtime.node.retrieval_config import PROBE_TOKENS
from runtime.retrieval.passages import Passage, ignore_size
from runtime.serving.http.service import Collections
from runtime.serving.messages import Probe, ProbeOutcome, Retrieval
from runtime.serving.triggers import PROBE_TIMEOUT_S, new_passages, trigger_of

_MAX_FIT_ROUNDS = 4  # of tokenizing a probe's passages until they fit
_WINDOW_CHARS = 200  # of the end of an answer: the query


class Probing:
    """The probes of one answer, every `retrieval.every_tokens` tokens and one at a time.

    The model's confidence is not available here, so the trigger "unsure" is not supported. A probe adds passages of up
    to `max_tokens` tokens.
    """

    def __init__(
        self,
        search: Collections,
        retrieval: Retrieval,
        seen: Set[str],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`seen`: ids of the passages that the answer has."""
        self._search, self._retrieval, self._seen, self._clock = search, retrieval, seen, clock
        self.max_tokens = retrieval.probe_tokens or PROBE_TOKENS
        self._search_task: asyncio.Task[list[Passage]] | None = None
        self._begin_token = self._begin_ns = 0
        trigger = trigger_of(retrieval)
        assert trigger is not None, "only answers with probes have one"
        self._trigger = trigger
        self.due = retrieval.every_tokens
        """Number of answer tokens at which the next probe is due."""

    @property
    def blocks(self) -> bool:
        """Whether the answer waits for a probe's passages."""
        return self._retrieval.probe_mode == "wait"

    @property
    def ready(self) -> bool:
        """Whether the outstanding probe has ended."""
        return self._search_task is not None and self._search_task.done()

    def start(self, tokens: int, text: str) -> None:
        """Start a probe at this number of answer tokens, with the end of `text` as query; no-op while one runs."""
        self.due = max(self.due, tokens) + self._retrieval.every_tokens
        if self._search_task is None:
            self._begin_token, self._begin_ns = tokens, self._clock()
            self._search_task = asyncio.create_task(self._run(text[-_WINDOW_CHARS:]))

    async def result(self) -> tuple[list[Passage], Probe]:
        """Wait for the running probe; return the passages that the answer does not have, nearest first."""
        assert self._search_task is not None, "a probe is running"
        outcome: ProbeOutcome = "answered"
        passages: list[Passage] = []
        try:
            passages = await self._search_task
        except DeadlineExceeded:
            outcome = "late"
        except TrinityError:
            outcome = "failed"
        self._search_task = None
        new: list[Passage] = []
        if outcome == "answered":
            outcome, new = new_passages(self._trigger, passages, self._seen)
        return new, Probe(self._begin_token, self._begin_ns, self._clock(), 0, 0, outcome)

    def cancel(self) -> None:
        """Cancel the running probe, if any, because the answer has ended."""
        if self._search_task is not None:
            self._search_task.cancel()
            self._search_task = None

    async def _run(self, text: str) -> list[Passage]:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self._search.search(
                    self._retrieval.query(text, "decode"),
                    on_embedded=_ignore,
                    on_read=ignore_size,
                    timeout_s=PROBE_TIMEOUT_S,
                )
        except TimeoutError:
            raise DeadlineExceeded(f"the probe took longer than its limit of {PROBE_TIMEOUT_S:g} s") from None


async def fit_tokens(server: Server, model: str, passages: Sequence[Passage], limit: int) -> tuple[Fitted, list[int]]:
    """Return the passages of at most `limit` tokens that the server's tokenizer counts, with their token ids; none if
    it does not count them."""
    size = limit
    for _ in range(_MAX_FIT_ROUNDS):
        fitted = fit(passages, size)
        if not fitted.used:
            break
        ids = await tokenize(server, model, inserted_text(fitted))
        if ids is None:
            break
        if len(ids) <= limit:
            return fitted, ids
        size = size * limit // len(ids)
    return Fitted(), []


def _ignore() -> None:
    """Callback for the end of a probe's embedding, which has no timestamp."""
