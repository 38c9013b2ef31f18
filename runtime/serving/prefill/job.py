"""One request's way through a prefill worker, and which prompts decode computes instead."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.node.config import Disaggregate
from runtime.serving.kv.blocks import BlockTable
from runtime.serving.kv.tiers import Load
from runtime.serving.messages import Decode, DecodeLoad, Prefill, Reserve
from runtime.serving.model.language_model import Sampler
from runtime.serving.triggers import Trigger, trigger_of

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Job:
    """What a prefill worker knows of a request. The KV of `done` of its `tokens` is in the blocks of `table`.

    `passages` are the ids of those in the prompt. `ticket`, `announcement` and `offer` are what it waits for: the
    pool's answer, decode's room (then it `has_room`), decode's word that the KV is pulled. The blocks are held under
    `lease`; a prompt that decode computes has neither. What KV tiers have of it is loaded first (`load`). A prompt of
    several passes is offered while it is computed, too (`ahead`).
    """

    request: Prefill
    stages: dict[str, int]
    ticket: int | None = None
    passages: tuple[str, ...] = ()
    build: str = ""  # of the collection that they are from
    tokens: list[int] = field(default_factory=list)
    announcement: int | None = None
    ahead: int | None = None
    has_room: bool = False
    lease: int | None = None
    table: BlockTable = field(default_factory=BlockTable)
    load: Load | None = None
    virtual_deadline_ns: int = 0  # once it is queued; see `virtual_deadline_ns`
    done: int = 0
    offer: int | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def deadline_ns(self) -> int:
        return self.request.generation.deadline_ns

    @property
    def salt(self) -> bytes:
        return self.request.generation.salt

    @property
    def resumed_token(self) -> int | None:
        """The answer's next token, if its consumer has it already."""
        return self.request.resume.last_token if self.request.resume else None

    @property
    def trigger(self) -> Trigger | None:
        """When its answer asks again."""
        return trigger_of(self.request.generation.retrieval)

    def sampler(self) -> Sampler | None:
        """What draws its first token; None if its consumer has that already."""
        if self.resumed_token is not None:
            return None
        resume = self.request.resume
        return Sampler(self.request.generation.sampling, drawn=len(resume.generated) if resume else 0)

    def for_room(self, model: bytes) -> Reserve:
        """The message that asks decode to keep room before the prompt is run, or while it is: with its blocks then."""
        blocks = tuple(self.table.blocks)
        return Reserve(
            self.id, self.request.frontend_epoch, tuple(self.tokens), self.deadline_ns, self.salt, blocks, model
        )

    def for_decode(self, model: bytes, first_token: int | None, scores: "torch.Tensor | None" = None) -> Decode:
        """The message of its offer: with the KV in `table`, or without any. `model` is the identity of the model; the
        first token was drawn from `scores`, unless it was told before."""
        request, asked, resume = self.request, self.request.generation, self.request.resume
        trigger = self.trigger
        generated, last_probe_at = (resume.generated, resume.last_probe_at) if resume else ((), 0)
        return Decode(
            request_id=self.id,
            frontend_epoch=request.frontend_epoch,
            sampling=asked.sampling,
            tokens=tuple(self.tokens),
            first_token=first_token,
            retrieval=asked.retrieval,
            seen_passages=self.passages,
            stages=self.stages,
            blocks=tuple(self.table.blocks),
            model=model,
            prompt_tokens=resume.prompt_tokens if resume else len(self.tokens),
            generated=generated,
            first_token_sent=self.resumed_token is not None,
            build=self.build,
            salt=self.salt,
            last_probe_at=last_probe_at,
            probe_after_first=trigger is not None
            and scores is not None
            and trigger.should_probe(len(generated) + 1, last_probe_at, scores),
        )


# ---- the order of prompts: each has its turn when it has waited for a multiple of what it takes alone
# So a chat is not kept waiting by a long document, and a document only by what comes within that time after it. It is
# the rule by which the pool orders decode queries. Pure: the simulated prefill worker runs this too.


_TURN = 6


def virtual_deadline_ns(received_ns: int, tokens: int, token_s: float) -> int:
    """The turn of a prompt of which `tokens` are to be computed, each in `token_s` (0: not known yet)."""
    return received_ns + round(_TURN * tokens * token_s * 1e9)


# ---- conditional disaggregation: which prompts are prefilled by the decode worker that writes their answers
# A prefill worker keeps prompts away from running batches. But a short one may go into a decode worker's step as well:
# nothing is handed over, and a queue in front of prefill is not waited for. A prompt is computed by decode if
#
# - a row is free there;
# - that is done no later than here: the prompts that were sent there before it, and the steps of the batch beside which
#   its chunks are run, take no longer than the prompts that wait here;
# - a step that carries a chunk of it still keeps the goal of a token.
#
# So a long prompt, of many chunks, is prefill's unless that has a long queue. NVIDIA Dynamo decides alike, by
# configured lengths of a prompt and of the queue; here they are measured times. Pure: the simulated prefill worker runs
# this too.


_REMEMBERED = 0.9  # of the passes before, with each pass


def should_prefill_on_decode(
    chunk_s: float, beside_s: float, ahead_s: float, sent_s: float, load: DecodeLoad, tpot_s: float
) -> bool:
    """Whether decode is to compute a prompt in chunks of `chunk_s`, beside steps that take `beside_s` together; it
    waits for others' prompts for `ahead_s` here, for `sent_s` there."""
    step_s = load.step_ns / 1e9 if load.rows else 0.0
    return load.rows < load.slots and sent_s + beside_s <= ahead_s and step_s + chunk_s <= tpot_s


class Disaggregation:
    """Decides for the prompts of one prefill worker. `tpot_s` is the goal of a token; decode runs `chunk_tokens` of
    prompts in one step."""

    def __init__(self, mode: Disaggregate, tpot_s: float, chunk_tokens: int) -> None:
        self._mode, self._tpot_s, self._chunk_tokens = mode, tpot_s, chunk_tokens
        self._seconds = self._tokens = 0.0  # of the last passes, the latest weigh most
        self._sent: dict[str, int] = {}  # decode worker → when it will have computed what was sent to it, in ns

    @property
    def token_s(self) -> float:
        """What a token of a prompt takes here, lately; 0 before the first pass."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def record_pass(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens has taken so long."""
        self._tokens = _REMEMBERED * self._tokens + tokens
        self._seconds = _REMEMBERED * self._seconds + seconds

    def route_to_decode(self, now_ns: int, worker: str, tokens: int, ahead: int, load: DecodeLoad) -> bool:
        """Whether a decode worker is to compute a prompt of `tokens` that are not cached, while `ahead` wait here.

        True counts as sent. Before the first pass nothing is known of times: prefill makes it.
        """
        if self._mode != "auto" or not self._tokens:
            return self._mode == "never"
        token_s = self.token_s
        passes = -(-tokens // self._chunk_tokens) - (not load.rows)  # beside others; more rows may come meanwhile
        beside_s = passes * load.step_ns / 1e9
        chunk_s = min(tokens, self._chunk_tokens) * token_s
        begin_ns = max(now_ns, self._sent.get(worker, 0))
        found = should_prefill_on_decode(
            chunk_s, beside_s, ahead * token_s, (begin_ns - now_ns) / 1e9, load, self._tpot_s
        )
        if found:
            self._sent[worker] = begin_ns + round((tokens * token_s + beside_s) * 1e9)
        return found
