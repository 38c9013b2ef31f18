"""Simulated node: arrivals → router → prefill → link → decode, with pools and the control loop.

Router, pool policy and control law are production's code; the other files of this package model the rest.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random

from msgspec.structs import replace

from runtime.errors import TrinityError
from runtime.node.control.law import INTERVAL_S, ControlLaw, Readings, SignalMeter
from runtime.node.control.planner import Planner, Work
from runtime.node.engine_config import BLOCK_TOKENS
from runtime.node.metrics.worker_metrics import Stage
from runtime.node.placement.pool_placement import PAIRED_ROLES, first_pools, pool_stages
from runtime.node.worker_config import KvWorkerSection
from runtime.serving.frontend.router import Router
from runtime.serving.messages import Hello, Report, Role
from runtime.serving.prefill.job import Disaggregation
from runtime.simulator.kv.prompt_blocks import PromptBlocks, prompt_blocks
from runtime.simulator.kv.routing import Knowledge
from runtime.simulator.result import Result, Sample
from runtime.simulator.roles import Roles
from runtime.simulator.setup import Setup
from runtime.simulator.stages.decode import SimDecode
from runtime.simulator.stages.decode_batches import MOST_STEPS, Batches
from runtime.simulator.stages.events import Events, ns
from runtime.simulator.stages.pool import Pools, slots_of
from runtime.simulator.stages.pool_tables import Gpu
from runtime.simulator.stages.prefill import SimPrefill
from runtime.simulator.stages.request import FINISHED, SimRequest
from runtime.simulator.traces import Arrival

_MAX_TOKENS = 1 << 40  # context limit: requests are not rejected for their length if blocks are not counted


class Simulation:
    """One run of the simulator. `run` processes all arrivals and returns the result.

    `most_steps`: decode steps in one event, during which contexts count as constant. `most_missed`: the run ends when
    more requests than that have missed an SLO; requests that have not ended by then count as missed.
    """

    def __init__(
        self,
        setup: Setup,
        arrivals: Sequence[Arrival],
        most_steps: int = MOST_STEPS,
        most_missed: float = float("inf"),
    ) -> None:
        self._setup, self._arrivals, self._most_steps = setup, arrivals, most_steps
        self._most_missed = most_missed
        self.events = Events()
        self.requests: list[SimRequest] = []
        self.refused: dict[str, int] = {}
        self._ended = self._oldest = 0  # `_oldest`: of the requests that may still expire
        self._samples: list[Sample] = []
        self._timeout_ns = ns(setup.config.http.request_timeout_s)
        config = setup.config
        self.router = Router(
            max_in_flight=config.http.max_in_flight,
            overlap_weight=config.http.overlap_weight,
            clock=lambda: self.events.now_ns,
        )
        self._judged = self._missed = 0
        self._roles = Roles(
            self.events,
            self.router,
            Planner.of(config, replace(config.slo, ttft_s=setup.slos.ttft_s, tpot_s=setup.slos.tpot_s)),
            self._work,
            self._is_idle,
        )
        self._build_workers()
        workers: list[SimPrefill | SimDecode] = [*self.prefills.values(), *self.decodes.values()]
        blocks = {worker.name: worker.prompts for worker in workers if worker.prompts is not None}
        self._knowledge = Knowledge(self.router, blocks)
        self._law = ControlLaw(config)
        self._meter = SignalMeter()

    # ---- building

    def _build_workers(self) -> None:
        setup, config, initial = self._setup, self._setup.config, self._setup.config
        both = config.prefill.workers + config.decode.workers
        if moves := config.control.planner == "act" and both > 2:  # every GPU has a worker of each role
            config = replace(
                config,
                prefill=replace(config.prefill, workers=both),
                decode=replace(config.decode, workers=both),
            )
        coupled = PAIRED_ROLES[config.pool.placement]
        slowdown = setup.times.extend_shared
        workers: dict[Stage, int] = {"prefill": config.prefill.workers, "decode": config.decode.workers}
        gpus = {
            stage: [Gpu(slowdown=slowdown if stage in coupled else 1.0) for _ in range(count)]
            for stage, count in workers.items()
        }
        stages = pool_stages(config.pool, workers)
        with_pool = [gpu for stage in coupled for gpu in gpus[stage]]
        with_pool += [Gpu() for _ in stages[len(with_pool) :]]
        rules = setup.policy.rules(config, slots_of(config.pool, setup.times))
        self._pools = Pools(
            self.events, setup.times, config.pool, [(rules, gpu) for gpu in with_pool or [Gpu()]], Random(setup.seed)
        )
        self.pools = self._pools.pools
        own_pool = iter(range(len(with_pool)))  # a coupled worker queries its own pool, others those of their stage
        groups = {
            stage: [self._pools.group([next(own_pool)]) for _ in range(count)]
            if stage in coupled
            else [self._pools.group(first_pools(stages, stage) or (0,))] * count
            for stage, count in workers.items()
        }
        batches = Batches(
            self.events, setup.times, config.decode, setup.workload, self._pools,
            [(gpu, groups["decode"][i], Random(setup.seed * 64 + i)) for i, gpu in enumerate(gpus["decode"])],
            self._most_steps,
        )  # fmt: skip
        self.decodes: dict[str, SimDecode] = {}
        self.prefills: dict[str, SimPrefill] = {}
        for i in range(config.decode.workers):
            decode = SimDecode(
                f"decode-{i}", self.events, setup.times, config.decode, batches,
                self._report, partial(self._end_once, outcome=FINISHED), self._prompts(config.decode),
            )  # fmt: skip
            self.decodes[decode.name] = decode
            self.router.add(self._hello("decode", decode.name, config.decode, decode.blocks, BLOCK_TOKENS))
        for i, gpu in enumerate(gpus["prefill"]):
            prompts = self._prompts(config.prefill)
            submit = partial(self._pools.submit, groups["prefill"][i], "prefill") if setup.workload.retrieval else None
            prefill = SimPrefill(
                f"prefill-{i}", self.events, setup.times, config.prefill, gpu,
                submit, self._offer, self._report, self._end_once,
                Disaggregation(config.handover.disaggregate, setup.slos.tpot_s, config.decode.chunk_tokens),
                prompts,
            )  # fmt: skip
            self.prefills[prefill.name] = prefill
            blocks, block_tokens = (0, 0) if prompts is None else (prompts.available, prompts.block_tokens)
            self.router.add(self._hello("prefill", prefill.name, config.prefill, blocks, block_tokens))
        if moves:
            prefills, decodes = list(self.prefills), list(self.decodes)
            inactive = [*prefills[initial.prefill.workers :], *decodes[initial.decode.workers :]]
            self._roles.begin({"prefill": prefills, "decode": decodes}, inactive)

    def _is_idle(self, worker: str) -> bool:
        """Return whether a worker has no work."""
        return (self.prefills.get(worker) or self.decodes[worker]).idle

    def _work(self, workers: dict[Stage, int]) -> Work:
        """Return the node's state for the planner."""
        prefills, decodes = self.prefills.values(), self.decodes.values()
        return Work(
            pass_s=sum(worker.busy_ns for worker in prefills) / 1e9,
            passed_tokens=sum(worker.tokens for worker in prefills),
            arrived_tokens=sum(worker.arrived_tokens for worker in prefills),
            decode_prompt_tokens=sum(worker.decode_prompt_tokens for worker in prefills),
            prompts=len(self.requests),
            row_s=sum(worker.row_ns - worker.batch.stall_ns for worker in decodes) / 1e9,
            tokens=sum(worker.batch.worker.tokens for worker in decodes),
            slo_requests=self._judged,
            slo_violations=self._missed,
            prefill_waiting=sum(worker.queued for worker in prefills),
            decode_waiting=sum(len(worker.offers) for worker in decodes),
            workers=workers,
        )

    def _prompts(self, limits: KvWorkerSection) -> PromptBlocks | None:
        """Return a worker's prompt blocks, if the trace contains shared blocks."""
        return prompt_blocks(self._arrivals, limits.slots, limits.kv_blocks * BLOCK_TOKENS)

    def _hello(self, role: Role, name: str, limits: KvWorkerSection, blocks: int, block_tokens: int) -> Hello:
        """`blocks`: of the worker; 0: not counted."""
        limit = blocks * block_tokens if limits.kv_blocks and blocks else _MAX_TOKENS
        return Hello(
            role=role, worker=name, epoch=1, pid=0, slots=limits.slots, limit_tokens=limit, block_tokens=block_tokens,
            blocks=blocks,
        )  # fmt: skip

    # ---- requests

    def run(self) -> Result:
        """Run the simulation. Deterministic: the same setup and arrivals give the same result."""
        if self._arrivals:
            self._plan_arrival(0)
            self._sample()
            if self._setup.policy.controlled:
                self._set_knobs()
                self._control()
            with _gc_disabled():
                self.events.run()
        return Result.of(self._setup, self._arrivals, self.requests, self.refused, self._samples, self._use())

    def _plan_arrival(self, i: int) -> None:
        self.events.at(ns(self._arrivals[i].at_s), lambda: self._arrive(i))

    def _arrive(self, i: int) -> None:
        if i + 1 < len(self._arrivals):
            self._plan_arrival(i + 1)
        arrival, now = self._arrivals[i], self.events.now_ns
        try:
            prefix, tokens = self._knowledge.prefix(arrival), arrival.prompt_tokens + arrival.output_tokens
            placement = self.router.place(prefix, tokens, blocks=len(arrival.prefix))
        except TrinityError as error:
            self.refused[error.code] = self.refused.get(error.code, 0) + 1
            self._count_end()
            return
        deadline_ns = now + self._timeout_ns
        request = SimRequest(arrival, now, deadline_ns, placement)
        if self._oldest == len(self.requests):
            self.events.at(deadline_ns, self._expire)
        self.requests.append(request)
        self.prefills[placement.prefill].receive(request)

    def _report(self, report: Report) -> None:
        self._roles.report(self._knowledge.report(report))

    def _offer(self, request: SimRequest, pulled: Callable[[], None]) -> None:
        if not request.by_decode:
            self._knowledge.computed(request)
        request.left_prefill = True
        self.router.prefilled(request.placement)
        self._decode_of(request).offer(request, pulled)

    def _decode_of(self, request: SimRequest) -> SimDecode:
        return self.decodes[request.placement.decode]

    def _end_once(self, request: SimRequest, outcome: str) -> None:
        if not request.ended:
            self.end(request, outcome)

    def _expire(self) -> None:
        """End requests at their deadlines, as the frontend does; the workers drop them later."""
        for request in self.requests[self._oldest :]:
            if not request.ended:
                if request.deadline_ns > self.events.now_ns:
                    self.events.at(request.deadline_ns, self._expire)
                    return
                self.end(request, "deadline_exceeded")
                self._decode_of(request).expire(request)
            self._oldest += 1

    def end(self, request: SimRequest, outcome: str) -> None:
        request.outcome, request.end_ns = outcome, self.events.now_ns
        if request.by_decode or not request.left_prefill:
            self._knowledge.computed(request)
        slos = self._setup.slos
        self._judged += 1
        self._missed += not request.met(slos.ttft_s, slos.tpot_s)
        self._count_end()
        self.router.finished(request.placement, prefilled=request.left_prefill)

    def _count_end(self) -> None:
        self._ended += 1
        if self._ended == len(self._arrivals) or self._missed > self._most_missed:
            self._roles.stopped = True
            self.events.stop()

    # ---- control and samples

    def _repeat(self, after_s: float, action: Callable[[], None]) -> None:
        """Plan `action`, until all requests have ended."""
        if self._ended < len(self._arrivals):
            self.events.after(ns(after_s), action)

    def _control(self) -> None:
        now_s = self.events.now_ns / 1e9
        if self._law.update(now_s, self._meter.update(now_s, self._readings())):
            self._set_knobs()
        self._repeat(INTERVAL_S, self._control)

    def _set_knobs(self) -> None:
        for pool in self.pools:
            pool.set_knobs(self._law.reserve, self._law.flush_prefill_s)

    def _readings(self) -> Readings:
        decodes = self.decodes.values()
        return Readings(
            links=len(decodes),
            link_busy_s=sum(decode.link_busy_ns for decode in decodes) / 1e9,
            row_s=sum(decode.row_ns for decode in decodes) / 1e9,
            stall_s=sum(decode.batch.stall_ns for decode in decodes) / 1e9,
            tokens=sum(decode.batch.worker.tokens for decode in decodes),
            wait_counts=[sum(bucket) for bucket in zip(*(pool.waits.tolist() for pool in self.pools), strict=True)],
        )

    def _sample(self) -> None:
        prefills, decodes = self.prefills.values(), self.decodes.values()
        self._samples.append(
            Sample(
                at_s=self.events.now_ns / 1e9,
                reserve=self.pools[0].tables.reserve,
                flush_prefill_s=self._law.flush_prefill_s,
                pool_prefill=sum(pool.waiting[0] for pool in self.pools),
                pool_decode=sum(pool.waiting[1] for pool in self.pools),
                prefill=sum(prefill.queued for prefill in prefills),
                offers=sum(len(decode.offers) for decode in decodes),
                rows=sum(decode.rows for decode in decodes),
                stalled=sum(decode.batch.worker.stalled for decode in decodes),
            )
        )
        self._repeat(self._setup.sample_s, self._sample)

    def _use(self) -> dict[str, float]:
        """Return busy shares over the run, and counters."""
        span = max(self.events.now_ns, 1)
        decodes, prefills = self.decodes.values(), self.prefills.values()
        row_ns = sum(decode.row_ns for decode in decodes)
        return {
            "prefill": sum(worker.busy_ns for worker in prefills) / span / max(len(prefills), 1),
            "decode": sum(worker.batch.worker.busy_ns for worker in decodes) / span / max(len(decodes), 1),
            "decode_slots": row_ns / span / max(len(decodes) * self._setup.config.decode.slots, 1),
            "link": sum(worker.link_busy_ns for worker in decodes) / span / max(len(decodes), 1),
            "pool": sum(pool.counters.busy_ns for pool in self.pools) / span / max(len(self.pools), 1),
            "pool_slots": sum(pool.counters.member_steps for pool in self.pools) / 1.0,
            "prefix_hits": sum(request.found_tokens for request in self.requests)
            / max(sum(request.arrival.prompt_tokens for request in self.requests), 1),
            "by_decode": float(sum(request.by_decode for request in self.requests)),
            "stall": sum(decode.batch.stall_ns for decode in decodes) / max(row_ns, 1),
            "queries": float(sum(pool.counters.served for pool in self.pools)),
            "probes": float(sum(decode.batch.worker.probes for decode in decodes)),
            "changes": float(self._law.changes),
            "span_s": span / 1e9,
            "moves": float(self._roles.moves),
            "events": float(self.events.processed),
        }


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would scan all requests of a trace repeatedly: a tenth of the run time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(setup: Setup, arrivals: Sequence[Arrival]) -> Result:
    """Simulate `arrivals` on the node that `setup` describes."""
    return Simulation(setup, arrivals).run()
