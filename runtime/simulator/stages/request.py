"""State of a request in the simulated node, and its outcome."""

from dataclasses import dataclass

from runtime.serving.frontend.router import Placement
from runtime.simulator.traces import Arrival

FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SimRequest:
    """Times are virtual ns. `outcome` is "" until the request ends, once, as "finished" or with an error code."""

    arrival: Arrival
    received_ns: int
    deadline_ns: int
    placement: Placement
    taken_ns: int = 0  # prefill's loop has received it
    embedded_ns: int = 0
    searched_ns: int = 0
    begun_ns: int = 0  # start of its first chunk
    prefilled_ns: int = 0
    first_token_ns: int = 0
    end_ns: int = 0
    outcome: str = ""
    left_prefill: bool = False
    by_decode: bool = False  # the decode worker computes its prompt
    done_tokens: int = 0  # computed or cached prompt tokens
    found_tokens: int = 0  # cached ones
    last_pass_tokens: int = 0  # computed by prefill's last pass
    virtual_deadline_ns: int = 0  # if prefill computes its prompt
    row: int = -1  # in decode's batch; -1: none
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
        """Return whether it finished within these TTFT and TPOT limits."""
        return self.outcome == FINISHED and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s
