"""How a simulated router knows what workers have cached: by their events, as in production, or in ways to compare with.

- "events": batches of fills and evictions, as the workers publish them, without delay.
- "estimate": no batches, so the router goes by what it sent to each worker and by when that evicted blocks.
- "sent": by what it sent alone, as in front of servers that publish nothing.
- "oracle": the caches themselves, and what the requests on their way to a worker will add.
- "random": any worker, whatever its load and its cache.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random

from msgspec.structs import replace

from runtime.serving.frontend.cached_blocks import WorkerBlocks
from runtime.serving.frontend.choice import BLOCK_TOKENS, PREFIX_BLOCKS, C, Choice
from runtime.serving.frontend.router import Router
from runtime.serving.kv.block_events import BlockEvents
from runtime.serving.messages import Report
from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Routing


class RandomChoice(Choice):
    """Chooses any candidate."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def choose(self, candidates: Iterable[C], order: Callable[[C], tuple[float, ...]]) -> C:
        return self._random.choice(list(candidates))


class Oracle(WorkerBlocks):
    """A worker's blocks as they are, and those that requests on their way there will add."""

    def __init__(self, router: Router, blocks: PromptBlocks) -> None:
        super().__init__(router.prefixes, 0, lambda key: False)
        self._blocks = blocks
        self.coming: Counter[bytes] = Counter()

    @property
    def current(self) -> bool:
        return True

    def share(self, key: bytes) -> float:
        return float(self._blocks.has(key) or self.coming[key] > 0)

    def expect(self, number: int) -> None:
        """It needs no batches."""


class Knowledge:
    """Keeps the router informed about the workers' blocks. `workers`: those with prompt blocks, by name."""

    def __init__(self, routing: Routing, router: Router, workers: Mapping[str, PromptBlocks], seed: int) -> None:
        self._router, self._workers, self._blind = router, workers, routing == "sent"
        self._events = {name: BlockEvents(one.manager) for name, one in workers.items()} if routing == "events" else {}
        self._oracles = {name: Oracle(router, one) for name, one in workers.items()} if routing == "oracle" else {}
        for worker in router.workers():
            worker.cached = self._oracles.get(worker.hello.worker, worker.cached)
            if routing == "sent":
                worker.hello = replace(worker.hello, blocks=0)
        if routing == "random":
            router.choice = RandomChoice(seed)

    def prefix(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the leading blocks of a prompt that the router looks at, with the workers' state of this moment."""
        for name in self._events:
            self._publish(name)
        most = PREFIX_BLOCKS * BLOCK_TOKENS // max(arrival.block_tokens, BLOCK_TOKENS)
        prefix = arrival.prefix[: min(most, arrival.known_blocks)]
        if self._oracles:
            self._router.prefixes.add(prefix, self._keys(arrival)[: len(prefix)])
        return prefix

    def report(self, report: Report) -> Report:
        """Return a worker's report, after its batches."""
        if report.worker not in self._events:
            return replace(report, evicted_ns=0) if self._blind else report
        self._publish(report.worker)
        saves = self._workers[report.worker].tiers.load_saves
        return replace(report, cached_batch=self._events[report.worker].number, load_saves=saves)

    def placed(self, request: SimRequest) -> None:
        for name, change in self._worker_keys(request):
            self._oracles[name].coming.update(change)

    def computed(self, request: SimRequest) -> None:
        """Tell the router the keys of a prompt that has its first token, as its token ids do in production."""
        if self._events:
            known = request.arrival.prefix[: request.arrival.known_blocks]
            self._router.prefixes.add(known, self._keys(request.arrival)[: len(known)])
        for name, change in self._worker_keys(request):
            self._oracles[name].coming.subtract(change)

    def _worker_keys(self, request: SimRequest) -> list[tuple[str, list[bytes]]]:
        names = {request.placement.prefill, request.placement.decode} & self._oracles.keys()
        return [(name, self._keys(request.arrival)) for name in sorted(names)]

    def _keys(self, arrival: Arrival) -> list[bytes]:
        blocks = next(iter(self._workers.values()))
        return list(blocks.manager.keys(arrival.prefix, compute=0))

    def _publish(self, name: str) -> None:
        while batch := self._events[name].take(name, 1):
            self._router.cached(batch)
