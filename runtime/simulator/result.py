"""Result of a run: attainment and goodput over all sent requests, percentiles, and samples over time."""

from collections.abc import Sequence

import msgspec
import numpy as np

from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import FINISHED, SimRequest
from runtime.simulator.traces import Arrival


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """State of the node at a time: control parameters, queue lengths, decode rows and rows stalled by a probe."""

    at_s: float
    reserve: float
    flush_prefill_s: float
    pool_prefill: int
    pool_decode: int
    prefill: int
    offers: int
    rows: int
    stalled: int


class Percentiles(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        if not values:
            return cls(0.0, 0.0, 0.0)
        return cls(*(float(np.percentile(values, q)) for q in (50, 90, 99)))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run. Shares refer to *sent* requests: a refused or failed one met no SLO. `goodput` in requests/s."""

    policy: str
    placement: str
    seed: int
    sent: int
    sent_per_s: float
    outcomes: dict[str, int]
    ttft_attainment: float
    tpot_attainment: float
    attainment: float
    goodput: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    use: dict[str, float]
    samples: list[Sample]

    @classmethod
    def of(
        cls,
        setup: Setup,
        arrivals: Sequence[Arrival],
        requests: Sequence[SimRequest],
        refused: dict[str, int],
        samples: list[Sample],
        use: dict[str, float],
    ) -> "Result":
        outcomes = dict(refused)
        for request in requests:
            outcomes[request.outcome] = outcomes.get(request.outcome, 0) + 1
        done = [request for request in requests if request.outcome == FINISHED]
        slos, sent = setup.slos, len(arrivals)
        first = [request.ttft_s <= slos.ttft_s for request in done]
        rest = [request.tpot_s <= slos.tpot_s for request in done]
        good = sum(a and b for a, b in zip(first, rest, strict=True))
        sent_per_s = sent / max(arrivals[-1].at_s, 1e-9) if arrivals else 0.0
        return cls(
            policy=str(setup.policy),
            placement=setup.config.pool.placement,
            seed=setup.seed,
            sent=sent,
            sent_per_s=sent_per_s,
            outcomes=outcomes,
            ttft_attainment=sum(first) / max(sent, 1),
            tpot_attainment=sum(rest) / max(sent, 1),
            attainment=good / max(sent, 1),
            goodput=good / max(sent, 1) * sent_per_s,
            ttft_s=Percentiles.of([request.ttft_s for request in done]),
            tpot_s=Percentiles.of([request.tpot_s for request in done if request.arrival.output_tokens > 1]),
            use=use,
            samples=samples,
        )
