"""The real prefill and decode workers on a virtual clock: the time of a forward pass is computed, not measured.

Their loops run unchanged. A step begins when the previous one has ended, or when a message arrives for a sleeping loop.
A forward pass advances the worker's clock, and messages sent before and after it become visible to the other side at
those times. Steps run in the order of their start, so that no worker sees messages of the future.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import count
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from runtime.node.config import parse_config
from runtime.node.placement.layout import lay_out
from runtime.retrieval.passages import Passage
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.serving import kv_worker, stages
from runtime.serving.decode import handover_queue
from runtime.serving.decode import process as decode_process
from runtime.serving.frontend.router import Placement, Router
from runtime.serving.messages import Generation, Hello, Prefill, Report, Retrieval, Role, Sampling, Tokens
from runtime.serving.prefill import process as prefill_process
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.testing.worker import make_worker

_EPOCH = 7
_NEVER_NS = 1 << 62


class Clock:
    """Clock of the worker that is being stepped."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


class Mail:
    """A queue of messages with delivery times."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._numbers = clock, count()
        self._heap: list[tuple[int, int, Any]] = []

    def put(self, what: Any, at_ns: int | None = None) -> None:
        heappush(self._heap, (self._clock.now_ns if at_ns is None else at_ns, next(self._numbers), what))

    def take(self) -> list[Any]:
        found = []
        while self._heap and self._heap[0][0] <= self._clock.now_ns:
            found.append(heappop(self._heap)[2])
        return found

    @property
    def next_ns(self) -> int:
        return self._heap[0][0] if self._heap else _NEVER_NS


class Frontend:
    """Places requests when prefill receives them. `done` has the stages of every finished request."""

    def __init__(self, clock: Clock, slots: dict[Role, int]) -> None:
        self.router = Router(max_in_flight=1 << 30, clock=clock.monotonic_ns)
        for role, count_ in slots.items():
            self.router.add(Hello(role, f"{role}-0", 1, 0, count_, 1 << 40))
        self.done: list[dict[str, int]] = []
        self._placed: dict[str, Placement] = {}

    def place(self, message: Prefill) -> Prefill:
        self._placed[message.request_id] = placement = self.router.place(())
        return replace(message, decode_load=placement.decode_load)

    def handle(self, message: Tokens) -> None:
        placement = self._placed[message.request_id]
        if message.prompt_token_ids:  # first chunk of the answer
            self.router.prefilled(placement)
        if message.finish_reason is not None:
            self.router.finished(placement, prefilled=True)
            self.done.append(dict(message.stages))


class Link:
    """A worker's connection to the frontend."""

    socket = None
    frontend_epoch = _EPOCH
    released = False
    malformed = SimpleNamespace(count=0)

    def __init__(self, clock: Clock, worker: str, frontend: Frontend) -> None:
        self.mail, self._worker, self._frontend = Mail(clock), worker, frontend

    def receive(self) -> list[Prefill]:
        return [self._frontend.place(message) for message in self.mail.take()]

    def send(self, message: Any) -> None:
        if isinstance(message, Tokens):
            self._frontend.handle(message)

    def report(self, *load: Any, **_: Any) -> None:
        self._frontend.router.report(Report(self._worker, 1, _EPOCH, *load))


class Handover:
    """Both ends of the KV hand-over: offers and acknowledgements. Copies take no time."""

    socket = None
    malformed = 0
    name = ""

    def __init__(self, clock: Clock, kv_bytes: int, leases: int) -> None:
        self.memory = memoryview(mmap(-1, kv_bytes))  # pages that are never written use no memory
        self.offers, self.outcomes = Mail(clock), Mail(clock)
        self.receive, self.poll = self.offers.take, self.outcomes.take
        self.free_leases, self.counts, self._ids = leases, Counter[str](), count(1)

    def lease(self) -> int | None:
        if not self.free_leases:
            return None
        self.free_leases -= 1
        return 0

    def release(self, lease: int) -> None:
        self.free_leases += 1

    def offer(self, endpoint: str, lease: int, payload: bytes) -> int:
        number = next(self._ids)
        self.offers.put(SimpleNamespace(offer_id=number, payload=payload, arena=0, epoch=0, slot=0, generation=0))
        return number

    def announce(self, endpoint: str, payload: bytes) -> int:
        return self.offer(endpoint, 0, payload)

    def withdraw(self, number: int) -> None:
        pass

    def set_written(self, lease: int, amount: int) -> None:
        pass

    def written(self, offer: Any) -> int:
        return 0

    def is_current(self, offer: Any) -> bool:
        return True

    def pull(self, *_: Any) -> Any:
        return SimpleNamespace(step=lambda for_ns: True, busy_ns=0, bytes=0, settled=True)

    def acknowledge(self, offer: Any) -> None:
        self.outcomes.put(SimpleNamespace(offer_id=offer.offer_id, accepted=True, reason=""))

    def reject(self, offer: Any, reason: str) -> None:
        self.outcomes.put(SimpleNamespace(offer_id=offer.offer_id, accepted=False, reason=reason))


class Retriever:
    """Embeds texts one after another; `poll` forwards embedded queries and returns the pool's results."""

    def __init__(self, clock: Clock, embed_ns: int, search_ns: int, passages: bool) -> None:
        self._clock, self._embed_ns, self._search_ns, self._passages = clock, embed_ns, search_ns, passages
        self._tickets = count(1)
        self._free_ns = 0
        self.embedding, self.searching = Mail(clock), Mail(clock)

    def submit(self, *_: Any, **__: Any) -> int:
        self._free_ns = max(self._free_ns, self._clock.now_ns) + self._embed_ns
        ticket = next(self._tickets)
        self.embedding.put((ticket, self._free_ns), self._free_ns)
        return ticket

    def poll(self) -> list[RetrievalResult]:
        for ticket, embedded_ns in self.embedding.take():
            passages = (Passage(f"p{ticket}", "", 0.0, "words " * 20),) if self._passages else ()
            found = RetrievalResult(ticket, passages, embedded_ns=embedded_ns)
            self.searching.put(found, self._clock.now_ns + self._search_ns)
        return self.searching.take()

    def cancel(self, ticket: int) -> None:
        pass


class Loop:
    """A worker, and the time of its next step."""

    def __init__(
        self, worker: Any, clock: Clock, cost_s: Callable[[Sequence[Any]], float], mail: Sequence[Mail]
    ) -> None:
        self.step: Callable[[], None] = worker.step
        self._clock, self._mail, self._next_ns, self._sleeps = clock, mail, 0, True
        worker._sleep = self._sleep
        worker._follower = SimpleNamespace(step=lambda now_ns: None)
        vocabulary = worker._model.info.vocabulary

        def logits(chunks: Sequence[Any]) -> torch.Tensor:
            clock.now_ns += round(cost_s(chunks) * 1e9)
            return torch.zeros(len(chunks), vocabulary)

        worker._model._logits = logits

    def _sleep(self) -> None:
        self._sleeps = True

    @property
    def next_ns(self) -> int:
        return max(self._next_ns, min(mail.next_ns for mail in self._mail)) if self._sleeps else self._next_ns

    def run(self) -> None:
        self._clock.now_ns, self._sleeps = self.next_ns, False
        self.step()
        self._next_ns = self._clock.now_ns


class Run(NamedTuple):
    """Stages of every request, in the order of their ends; and by worker the prompt tokens that were in its cache."""

    done: list[dict[str, int]]
    hit_tokens: dict[str, int]


def run_workers(
    model: Path,
    times: ServiceTimes,
    arrivals: Sequence[Arrival],
    *,
    search_s: float,
    every: int,
    passages: bool,
    **sections: Any,
) -> Run:
    """`search_s`: latency of the pool; `passages`: whether probes find any."""
    clock = Clock()
    no_tiers = {"kv": {"host_mib": 0}}  # not simulated, and shared by all runs
    plan = lay_out(parse_config({"model": {"name": str(model), "context_tokens": 2048}, **sections, **no_tiers}))
    assert plan.config.own_model is not None
    handover = Handover(clock, 1 << 26, plan.config.prefill.slots)
    transport: Any = SimpleNamespace(
        source=lambda *_, **__: handover, sink=lambda endpoint: handover, device="cpu", kernels="cpu"
    )
    prefill: Any = prefill_process.PrefillWorker(make_worker(plan, "prefill-0"), transport)
    decode: Any = decode_process.DecodeWorker(make_worker(plan, "decode-0"), transport)
    retrievers = [
        Retriever(clock, round(times.embed_s * 1e9), round(search_s * 1e9), some) for some in (False, passages)
    ]
    frontend = Frontend(clock, {"prefill": plan.config.prefill.slots, "decode": plan.config.decode.slots})
    links = [Link(clock, name, frontend) for name in ("prefill-0", "decode-0")]
    for worker, link, retriever in zip((prefill, decode), links, retrievers, strict=True):
        worker.link.close()
        worker.retriever.close()
        worker.link, worker.retriever = link, retriever
    loops = [
        Loop(worker, clock, partial(cost, times), (mail, link.mail, retriever.embedding, retriever.searching))
        for worker, cost, mail, link, retriever in zip(
            (prefill, decode),
            (_prefill_cost_s, _decode_cost_s),
            (handover.outcomes, handover.offers),
            links,
            retrievers,
            strict=True,
        )
    ]
    decode.probes.retriever, decode.probes.clock = retrievers[1], clock.monotonic_ns
    decode._counted_ns = 0
    decode._step_ns = round(times.decode_step_s * 1e9)
    for number, arrival in enumerate(arrivals):
        at_ns = round(arrival.at_s * 1e9)
        generation = Generation(
            Sampling(arrival.output_tokens, ignore_eos=True),
            received_ns=at_ns,
            deadline_ns=1 << 62,
            prompt=_prompt(number, arrival),
            retrieval=Retrieval("docs", 1, every, probe_tokens=64),
        )
        message = Prefill(f"r{number}", _EPOCH, generation, "decode-0", "")
        links[0].mail.put(message, at_ns)
    with _on(clock):
        while len(frontend.done) < len(arrivals):
            min(loops, key=lambda loop: loop.next_ns).run()
    hit_tokens = {worker._worker.name: worker._blocks.hit_tokens for worker in (prefill, decode)}
    return Run(frontend.done, hit_tokens)


def _prompt(number: int, arrival: Arrival) -> tuple[int, ...]:
    """Return the prompt's tokens: those of its prefix blocks are shared by equal blocks, the others are unique."""
    known = [(block, i) for block in arrival.prefix for i in range(arrival.block_tokens)][: arrival.prompt_tokens]
    own = (number * 7 + i * i for i in range(len(known), arrival.prompt_tokens))
    return tuple(token % 250 + 3 for token in (*map(hash, known), *own))


@contextmanager
def _on(clock: Clock) -> Iterator[None]:
    """Patch the clock into the modules that take the stages' timestamps."""
    modules: tuple[Any, ...] = (prefill_process, decode_process, kv_worker, handover_queue)
    for module in modules:
        module.time = clock
    try:
        yield
    finally:
        for module in modules:
            module.time = time


def _prefill_cost_s(times: ServiceTimes, chunks: Sequence[Any]) -> float:
    return times.prefill_pass_s + sum(times.prefill_s(chunk.start, len(chunk.tokens)) for chunk in chunks)


def _decode_cost_s(times: ServiceTimes, chunks: Sequence[Any]) -> float:
    more = sum(times.prefill_s(chunk.start, len(chunk.tokens) - 1) for chunk in chunks if len(chunk.tokens) > 1)
    return times.decode_s(len(chunks), sum(chunk.start for chunk in chunks)) + more


def spans(done: Sequence[dict[str, int]], tokens: dict[int, int]) -> dict[str, list[float]]:
    """Return TTFT and TPOT in ms; `tokens`: number of output tokens by time of receipt."""
    ttft = [(one[stages.FIRST_TOKEN] - one[stages.RECEIVED]) / 1e6 for one in done]
    tpot = [(one[stages.END] - one[stages.FIRST_TOKEN]) / 1e6 / (tokens[one[stages.RECEIVED]] - 1) for one in done]
    return {"ttft": ttft, "tpot": tpot}
