"""A request on its way through the simulated node, and how it ended."""

from dataclasses import dataclass

from runtime.serving.frontend.router import Placement
from runtime.simulator.traces import Arrival

FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SimRequest:
    """Times are virtual ns; `outcome` is "" until it ends: once, as "finished" or with an error's code."""

    arrival: Arrival
    received_ns: int
    deadline_ns: int
    placement: Placement
    taken_ns: int = 0  # prefill's loop has seen it
    embedded_ns: int = 0
    searched_ns: int = 0
    begun_ns: int = 0  # its first chunk goes through the model
    prefilled_ns: int = 0
    first_token_ns: int = 0
    end_ns: int = 0
    outcome: str = ""
    left_prefill: bool = False
    by_decode: bool = False  # its prompt is computed by the decode worker
    done_tokens: int = 0  # of the prompt
    found_tokens: int = 0  # of them its worker had the KV already
    virtual_deadline_ns: int = 0  # of its prompt, where prefill computes it
    load_ns: int = 0  # of loading left, of what KV tiers have of it
    announced: bool = False  # decode is asked to keep room before it is computed
    has_room: bool = False  # and does
    row: int = -1  # of decode's batch
    stalled_ns: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.outcome)

    @property
    def ttft_s(self) -> float:
        return (self.first_token_ns - self.received_ns) / 1e9

    @property
    def tpot_s(self) -> float:
        """As `stages.stage_seconds` has it; 0 for an answer of one token."""
        return (self.end_ns - self.first_token_ns) / 1e9 / max(self.arrival.output_tokens - 1, 1)

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it finished with its first token and the others within these limits."""
        return self.outcome == FINISHED and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s
