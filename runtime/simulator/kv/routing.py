"""What a simulated router knows of the workers' caches: batches of fills and evictions, as in production, without
delay."""

from collections.abc import Mapping

from msgspec.structs import replace

from runtime.serving.frontend.choice import BLOCK_TOKENS, PREFIX_BLOCKS
from runtime.serving.frontend.router import Router
from runtime.serving.kv.block_events import BlockEvents
from runtime.serving.messages import Report
from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.traces import Arrival


class Knowledge:
    """Keeps the router informed about the workers' blocks. `workers`: those with prompt blocks, by name."""

    def __init__(self, router: Router, workers: Mapping[str, PromptBlocks]) -> None:
        self._router, self._workers = router, workers
        self._events = {name: BlockEvents(one.manager) for name, one in workers.items()}

    def prefix(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the leading blocks of a prompt that the router looks at, with the workers' state of this moment."""
        for name in self._events:
            self._publish(name)
        most = PREFIX_BLOCKS * BLOCK_TOKENS // max(arrival.block_tokens, BLOCK_TOKENS)
        return arrival.prefix[: min(most, arrival.known_blocks)]

    def report(self, report: Report) -> Report:
        """Return a worker's report, after its batches."""
        if report.worker not in self._events:
            return report
        self._publish(report.worker)
        return replace(report, cached_batch=self._events[report.worker].number)

    def computed(self, request: SimRequest) -> None:
        """Tell the router the keys of a prompt that has its first token, as its token ids do in production."""
        if self._workers:
            known = request.arrival.prefix[: request.arrival.known_blocks]
            manager = next(iter(self._workers.values())).manager
            self._router.prefixes.add(known, list(manager.keys(request.arrival.prefix, compute=0))[: len(known)])

    def _publish(self, name: str) -> None:
        while batch := self._events[name].take(name, 1):
            self._router.cached(batch)
