"""A request in a prefill worker (`Job`), the order of prompts, and the choice of the worker that prefills a prompt."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.node.config import Disaggregate
from runtime.serving.kv.blocks import BlockTable
from runtime.serving.kv.tiers import Load, SavedRow
from runtime.serving.messages import Decode, DecodeLoad, Prefill, Reserve
from runtime.serving.model.sampler import Sampler
from runtime.serving.triggers import Trigger, trigger_of

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Job:
    """State of one request in a prefill worker. The KV of the first `done` of its `tokens` is in the blocks of `table`.

    `passages` are the ids of the passages in the prompt, `build` the build of their collection. A job waits for the
    pool's answer (`ticket`), and for decode to pull the KV (`offer`). Its blocks are held under `lease`; a prompt that
    decode computes has neither lease nor blocks. `load` copies cached KV from the tiers before the prompt is computed;
    then that of `cached_tokens` is there. `saved`: its KV waits in a tier for decode. A prompt of several passes is
    also offered while it is computed (`early_offer`).
    """

    request: Prefill
    stages: dict[str, int]
    ticket: int | None = None
    passages: tuple[str, ...] = ()
    build: str = ""
    tokens: list[int] = field(default_factory=list)
    early_offer: int | None = None
    lease: int | None = None
    table: BlockTable = field(default_factory=BlockTable)
    load: Load | None = None
    saved: SavedRow | None = None
    virtual_deadline_ns: int = 0  # set when it is queued
    done: int = 0
    cached_tokens: int = 0
    offer: int | None = None
    trigger: Trigger | None = field(init=False)  # the condition under which its answer probes the pool

    def __post_init__(self) -> None:
        self.trigger = trigger_of(self.request.generation.retrieval)

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
        """The next token of a resumed answer that the client has received already."""
        return self.request.resume.last_token if self.request.resume else None

    def sampler(self) -> Sampler | None:
        """Return the sampler of its first token; None if the client has that token already."""
        if self.resumed_token is not None:
            return None
        resume = self.request.resume
        return Sampler(self.request.generation.sampling, drawn=len(resume.generated) if resume else 0)

    def reserve_message(self, model: bytes) -> Reserve:
        """Return the message that lets decode pull what is computed. `model` is the identity of the model."""
        blocks = tuple(self.table.blocks)
        return Reserve(
            self.id, self.request.frontend_epoch, tuple(self.tokens), self.deadline_ns, self.salt, blocks, model
        )

    def decode_message(self, model: bytes, first_token: int | None, scores: "torch.Tensor | None" = None) -> Decode:
        """Return the message of its offer, with the KV blocks of `table` if there are any.

        `model` is the identity of the model. `scores` are the logits that the first token was sampled from; None for a
        resumed token.
        """
        request, generation, resume = self.request, self.request.generation, self.request.resume
        trigger = self.trigger
        generated, last_probe_at = (resume.generated, resume.last_probe_at) if resume else ((), 0)
        return Decode(
            request_id=self.id,
            frontend_epoch=request.frontend_epoch,
            sampling=generation.sampling,
            tokens=tuple(self.tokens),
            first_token=first_token,
            retrieval=generation.retrieval,
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
            cached_tokens=self.cached_tokens,
            saved=self.saved is not None,
        )


# ---- order of prompts: earliest virtual deadline first
# The virtual deadline of a prompt is its arrival plus a multiple of its own service time. A short chat passes a long
# document, and the document is delayed only by prompts that arrive within that multiple of its service time. The pool
# orders its decode queries by the same rule. Pure: the simulated prefill worker runs this code too.


_VIRTUAL_DEADLINE_FACTOR = 6


def virtual_deadline_ns(received_ns: int, tokens: int, token_s: float) -> int:
    """Return the virtual deadline of a prompt with `tokens` tokens to compute, `token_s` seconds each (0: not measured
    yet)."""
    return received_ns + round(_VIRTUAL_DEADLINE_FACTOR * tokens * token_s * 1e9)


# ---- conditional disaggregation: which prompts the decode worker computes itself
# Prefill workers keep prompts out of running decode batches. A short prompt, however, fits into a decode worker's step:
# its KV is not handed over, and it does not wait in prefill's queue. Decode computes a prompt if
#
# - it has a free row;
# - it finishes the prompt no later than prefill would: the prompts sent to it before, plus the batch steps beside which
#   the chunks run, take no longer than the prompts that are queued here;
# - a step that carries a chunk of the prompt still meets the TPOT goal.
#
# So a long prompt, which has many chunks, goes to prefill unless its queue is long. NVIDIA Dynamo makes the same
# decision by configured prompt and queue lengths; this one uses measured times. Pure: the simulated prefill worker runs
# this code too.


_DECAY = 0.9  # weight of earlier passes, applied with each new pass


class Disaggregation:
    """Decides for each prompt of a prefill worker whether decode computes it. `tpot_s` is the goal of a token; a decode
    step carries at most `chunk_tokens` prompt tokens."""

    def __init__(self, mode: Disaggregate, tpot_s: float, chunk_tokens: int) -> None:
        self._mode, self._tpot_s, self._chunk_tokens = mode, tpot_s, chunk_tokens
        self._seconds = self._tokens = 0.0  # exponentially decayed sums over passes
        self._busy_until_ns: dict[str, int] = {}  # decode worker → when it will have computed the prompts sent to it

    @property
    def token_s(self) -> float:
        """Recent time per prompt token in this worker; 0 before the first pass."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def record_pass(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass of `tokens` tokens."""
        self._tokens = _DECAY * self._tokens + tokens
        self._seconds = _DECAY * self._seconds + seconds

    def route_to_decode(self, now_ns: int, worker: str, tokens: int, queued: int, load: DecodeLoad) -> bool:
        """Return whether decode worker `worker` should compute a prompt with `tokens` uncached tokens, while `queued`
        tokens wait here. True counts the prompt as sent to that worker.

        Before the first pass no times are known, so prefill computes the prompt.
        """
        if self._mode != "auto" or not self._tokens:
            return self._mode == "never"
        token_s = self.token_s
        step_s = load.step_ns / 1e9 if load.rows else 0.0
        passes = -(-tokens // self._chunk_tokens) - (not load.rows)  # beside others; more rows may arrive meanwhile
        beside_s = passes * load.step_ns / 1e9
        chunk_s = min(tokens, self._chunk_tokens) * token_s
        begin_ns = max(now_ns, self._busy_until_ns.get(worker, 0))
        sent_s = (begin_ns - now_ns) / 1e9
        sooner = sent_s + beside_s <= queued * token_s
        on_decode = load.rows < load.slots and sooner and step_s + chunk_s <= self._tpot_s
        if on_decode:
            self._busy_until_ns[worker] = begin_ns + round((tokens * token_s + beside_s) * 1e9)
        return on_decode
