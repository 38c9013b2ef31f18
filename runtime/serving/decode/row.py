"""One sequence of a decode worker."""

from dataclasses import dataclass, field

from runtime.serving.kv.blocks import BlockTable
from runtime.serving.kv.transfer import Transfer
from runtime.serving.messages import Decode, FinishReason, Probe
from runtime.serving.model.sampling import Sampler
from runtime.serving.model.text import TextStream


@dataclass(eq=False)
class Row:
    """A sequence. `context` are all its tokens; its blocks hold the first `cached`, the rest goes through the model
    next.

    A row that made room for others has no `table`. Its KV is in `swapped` places, or nowhere and computed again; on its
    way back from there it is `returning`.
    """

    request: Decode
    context: list[int]
    cached: int
    sampler: Sampler
    text: TextStream
    table: BlockTable | None
    generated: int
    token_ns: int  # when its last token was there
    running: bool = False  # it has a place in the running batch
    swapped: list[int] = field(default_factory=list)
    returning: Transfer | None = None
    fresh: list[int] = field(default_factory=list)  # sampled, not yet told to the frontend
    pending_text: str = ""
    seen: set[str] = field(default_factory=set)  # ids of the passages that are in the context
    build: str = ""  # of their collection: what probes add is from the same
    ticket: int | None = None
    asked_at: int = 0  # tokens generated when its last probe was asked
    asked_ns: int = 0
    stalled_ns: int = 0
    probes: list[Probe] = field(default_factory=list)  # that are over, not yet told to the frontend
    finish: FinishReason | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def stalled(self) -> bool:
        """Whether it stands still until a probe's passages are there."""
        retrieval = self.request.retrieval
        return self.ticket is not None and retrieval is not None and retrieval.probe_mode == "wait"

    @property
    def ready(self) -> bool:
        """Whether all that it has cached is in its blocks."""
        return self.table is not None and self.returning is None
