"""Probes: what is asked of the pool while an answer is written, and what of its findings is new to the answer."""

import asyncio
import time
from collections.abc import Callable

from runtime.errors import DeadlineExceeded, TrinityError
from runtime.retrieval.passages import PartialPassages, Passage
from runtime.retrieval.search.query import PassageQuery
from runtime.serving.http.service import SearchSource
from runtime.serving.messages import Probe, ProbeOutcome, Retrieval, Retrieved
from runtime.serving.triggers import trigger_of

_TIMEOUT_S = 2.0  # an answer waits for its passages no longer than this, then goes on without them
_WINDOW_CHARS = 200  # the last words of an answer, with which it asks


class Probing:
    """The probes of one answer, every `retrieval.every_tokens` tokens, one at a time: nobody tells here how sure the
    model is, so of the triggers there are those that need not know. A probe brings passages of `most_tokens` tokens at
    most; of one that some nodes were not asked for, the answer is told so."""

    def __init__(
        self,
        request_id: str,
        tell: Callable[[Retrieved], None],
        search: SearchSource,
        retrieval: Retrieval,
        most_tokens: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._request_id, self._tell = request_id, tell
        self._search, self._retrieval, self._clock = search, retrieval, clock
        self.most_tokens = min(most_tokens, retrieval.probe_tokens or most_tokens)
        self._asking: asyncio.Task[list[Passage]] | None = None
        self._asked_at = self._asked_ns = 0
        self.seen: set[str] = set()
        self._trigger = trigger_of(retrieval)
        self.due = retrieval.every_tokens
        """After so many tokens it asks next."""

    @property
    def waits(self) -> bool:
        """Whether the answer stands still meanwhile."""
        return self._retrieval.probe_mode == "wait"

    @property
    def came(self) -> bool:
        """Whether what was asked has been answered."""
        return self._asking is not None and self._asking.done()

    def ask(self, told: int, text: str) -> None:
        """Ask with the last words of `text`, after `told` tokens; not while a probe is out."""
        self.due = max(self.due, told) + self._retrieval.every_tokens
        if self._asking is None:
            self._asked_at, self._asked_ns = told, self._clock()
            self._asking = asyncio.create_task(self._found(text[-_WINDOW_CHARS:]))

    async def take(self) -> tuple[list[Passage], Probe]:
        """What the probe that is out brings: the passages that the answer does not have (`seen`), nearest first."""
        assert self._asking is not None, "a probe is out"
        outcome: ProbeOutcome = "answered"
        found: list[Passage] = []
        try:
            found = await self._asking
        except DeadlineExceeded:
            outcome = "late"
        except TrinityError:
            outcome = "failed"
        self._asking = None
        if isinstance(found, PartialPassages):
            self._tell(Retrieved(self._request_id, (), self._asked_at, partial=True))
        if outcome == "answered" and self._trigger is not None and not self._trigger.accepts(found, self.seen):
            outcome, found = "near", []
        new = [passage for passage in found if passage.id not in self.seen]
        return new, Probe(self._asked_at, self._asked_ns, self._clock(), 0, 0, outcome)

    def drop(self) -> Probe | None:
        """The answer has ended: nobody waits for the probe that is out, if one is."""
        if self._asking is None:
            return None
        self._asking.cancel()
        self._asking = None
        return Probe(self._asked_at, self._asked_ns, self._clock(), 0, 0, "dropped")

    async def _found(self, query: str) -> list[Passage]:
        asked = self._retrieval
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._search.search(
                    PassageQuery(
                        asked.collection, asked.k, query, stage="decode", wanted=asked.filter, hybrid=asked.hybrid
                    ),
                    embedded=_nothing,
                    timeout_s=_TIMEOUT_S,
                )
        except TimeoutError:
            raise DeadlineExceeded(f"the probe took longer than its limit of {_TIMEOUT_S:g} s") from None


def _nothing() -> None:
    """What is done when a probe is embedded."""
