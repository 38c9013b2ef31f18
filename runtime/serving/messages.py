"""What frontend and workers say to each other, over ZeroMQ, as MessagePack.

The frontend binds one ROUTER socket; every prefill and decode worker connects a DEALER to it. KV blocks and search
queries do not travel here: they have channels of their own (`ipc.handover.messages`, `ipc.session.messages`).

```
prefill, decode ── Hello, Report ─────────────────▶ frontend
frontend ───────── Welcome, Prefill, Cancel ──────▶ prefill
prefill ────────── Retrieved, Failed ─────────────▶ frontend
prefill ────────── offers that carry Reserve, Decode ▶ decode   (serving.kv.transport)
decode ─────────── Retrieved, Tokens, Failed ─────▶ frontend
frontend ───────── Welcome, Cancel ───────────────▶ decode
```

A request that is started again after a worker's death has a new id for the workers (`attempt_id`), so that nothing of
the attempt before can be taken for its own.

The frontend owns the life of a request: each ends exactly once there, with a `Tokens` that has a `finish_reason` or
with a `Failed`. `Cancel` is idempotent and frees whatever a worker holds for the request; it is also the answer to a
piece of a request that has ended (a hand-over can overtake the first `Cancel`).
All times are `time.monotonic_ns()`, one clock for all processes of a node.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from runtime.node.retrieval_config import PassagePlace, ProbeTrigger
from runtime.retrieval.passages import Passage

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode"]
ProbeMode = Literal["wait", "prefetch"]
ProbeOutcome = Literal["answered", "near", "late", "failed", "dropped"]
"""near: a passage in use is, and nothing was taken; dropped: the row ended first."""


class Retrieval(msgspec.Struct, frozen=True):
    """Ask `collection` for `k` passages before prefill, and again every `every_tokens` generated tokens (0: never).

    At such a probe the row waits, or goes on and takes the passages when they come ("prefetch"). A probe adds at most
    `probe_tokens` tokens of passages that the row does not have yet; 0: as many as the node allows. `filter`: only
    passages that pass it are found; as pools take it, b"" for all. `hybrid`: the share of what words find, 0 for none.
    `trigger` and its `threshold`: when it asks again (`triggers.py`). `place`: where passages stand in a chat.
    """

    collection: str
    k: int = 4
    every_tokens: int = 0
    probe_mode: ProbeMode = "wait"
    probe_tokens: int = 0
    filter: bytes = b""
    hybrid: float = 0.0
    trigger: ProbeTrigger = "every"
    threshold: float = 0.0
    place: PassagePlace = "system"


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. `temperature` 0 is greedy. `stop` strings end the text and are not part of it."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: str
    content: str


class Generation(msgspec.Struct, frozen=True):
    """What a user asks for: what is written after `messages` (a chat; rendered with the model's chat template) or after
    `prompt` (text, or token ids), of which one is set, by `deadline_ns`. Only with the same `salt` is KV shared."""

    sampling: Sampling
    received_ns: int
    deadline_ns: int
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    retrieval: Retrieval | None = None
    salt: bytes = b""


# ---- worker → frontend


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready. A decode worker takes hand-overs at `endpoint`; `limit_tokens` bounds prompt + answer."""

    role: Role
    worker: str
    epoch: int
    pid: int
    slots: int
    limit_tokens: int
    endpoint: str = ""
    block_tokens: int = 0  # of a KV block; 0: the worker does not tell
    blocks: int = 0


class Report(msgspec.Struct, frozen=True, tag=True):
    """A worker's load, sent when it changes and at least every 250 ms.

    `frontend_epoch` is the one it serves (0: none). A `draining` worker finishes what it has and is given nothing new.
    Of requests that came before `evicted_ns` it has given up cached KV blocks, the longest unused first. A step of a
    decode worker's batch, without prompts, takes about `step_ns`.
    """

    worker: str
    epoch: int
    frontend_epoch: int
    queued: int
    running: int
    free_slots: int
    draining: bool = False
    free_blocks: int = 0
    evicted_ns: int = 0
    step_ns: int = 0


class Retrieved(msgspec.Struct, frozen=True, tag=True):
    """Passages found for a request: before prefill (`at_token` 0) or by a probe after `at_token` tokens; their texts
    stay with the worker, no client is told them.

    The prefill worker sends one for every request with retrieval, before the hand-over, even if nothing was found.
    `inserted` are a probe's tokens as they went into the context: before the token that was the last one then.
    `partial`: some of the nodes that the collection is on were not asked, so that a probe may have brought nothing.
    """

    request_id: str
    passages: tuple[Passage, ...]
    at_token: int = 0
    inserted: tuple[int, ...] = ()
    stages: dict[str, int] = {}  # with the passages found before prefill: the stamps so far
    partial: bool = False


class Probe(msgspec.Struct, frozen=True):
    """One probe of a row that is over: asked after `at_token` tokens, it brought `passages` that the row did not have,
    and held the row for `stalled_ns` (in mode "prefetch" not at all).
    """

    at_token: int
    begin_ns: int
    end_ns: int
    stalled_ns: int
    passages: int
    outcome: ProbeOutcome


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The next piece of an answer. The last one has a `finish_reason`, the usage and the times of the request's stages.

    `token_ids` are the tokens sampled since the last piece (`text` may lag behind while a stop string is possible).
    The first piece carries the stages' times so far, and the prompt's tokens as the model saw them (3 KB and 30 µs for
    a thousand): with them the answer can go on elsewhere even if its collection has been replaced since. `probes` are
    those that ended since the last piece; the last that was asked was after `last_probe_at` tokens of the answer.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    stages: dict[str, int] = {}  # name → monotonic ns, see `stages.py`
    prompt_token_ids: tuple[int, ...] = ()
    stalled_ns: int = 0  # with the last piece: how long the answer stood still for probes
    probes: tuple[Probe, ...] = ()
    last_probe_at: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request ended with an error; `code` names its class (`runtime.errors.error_from_code`)."""

    request_id: str
    code: str
    message: str
    param: str | None = None


# ---- frontend → worker


class Release(msgspec.Struct, frozen=True, tag=True):
    """To a draining worker: nothing is placed on it any more, and nothing will be."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The frontend of this epoch hears the worker. Requests of any other epoch are dropped by the worker.

    It answers every `Hello`, and any message of a worker that the frontend does not know (it was restarted): a worker
    for which the epoch is new says `Hello` (again).
    """

    frontend_epoch: int


class Resume(msgspec.Struct, frozen=True):
    """Where an answer goes on whose decode worker died.

    `tokens` is the whole sequence so far: a prompt of `prompt_tokens` tokens, then the `generated` ones and what probes
    inserted between them. `seen_passages` are the ids of the passages in it; the first token left decode at
    `first_token_ns`. `last_token`, if given, is the answer's last one, not among `tokens` and `generated`: the probe
    that it called for was lost with the worker, and is retried. The last probe before it was after `last_probe_at`
    tokens.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    generated: tuple[int, ...]
    seen_passages: tuple[str, ...]
    first_token_ns: int
    last_token: int | None = None
    last_probe_at: int = 0


class DecodeLoad(msgspec.Struct, frozen=True):
    """A decode worker when a request is placed on it: `rows` of `slots` are taken by others, a step takes `step_ns`.
    0 slots: not known."""

    rows: int = 0
    slots: int = 0
    step_ns: int = 0


UNKNOWN_LOAD = DecodeLoad()


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Run a prompt, then hand its KV over to the decode worker at `decode_endpoint`; or have that run it, if it may as
    well (`decode_load`, see `prefill/job.py`).

    With `resume` the pool is not asked, and the next token is drawn as the lost worker would have drawn it; messages
    and prompt are left out then.
    """

    request_id: str
    frontend_epoch: int
    generation: Generation
    decode_worker: str
    decode_endpoint: str
    resume: Resume | None = None
    decode_load: DecodeLoad = UNKNOWN_LOAD


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request and free what it holds. Unknown ids are ignored."""

    request_id: str


# ---- prefill → decode, as the payload of a KV offer or announcement


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """A prompt that will be offered: keep room for it, until `deadline_ns` at most.

    With `blocks`, as in `Decode`, it is being computed: as much as the source says is written may be pulled already.
    """

    request_id: str
    frontend_epoch: int
    tokens: tuple[int, ...]
    deadline_ns: int
    salt: bytes = b""
    blocks: tuple[int, ...] = ()
    model: bytes = b""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """All that decode needs beside the KV: `tokens` are those in it, `first_token` the one prefill sampled after them.

    `blocks` are the prefill worker's, in order, and `model` its model's identity. Without blocks there is no KV: decode
    computes it, and samples the first token unless it is given. `prompt_tokens` of the tokens are the prompt;
    `generated` are those of the answer so far, without `first_token` (empty unless the answer is resumed).
    `first_token_sent`: the client has received the first token already. `build` is the build of the collection that the
    passages are from, "" without passages; probes search the same build. The last probe of a resumed answer was after
    `last_probe_at` tokens; `probe_after_first`: the first token triggers a probe, as prefill has determined.
    """

    request_id: str
    frontend_epoch: int
    sampling: Sampling
    tokens: tuple[int, ...]
    first_token: int | None
    retrieval: Retrieval | None
    seen_passages: tuple[str, ...]
    stages: dict[str, int]
    blocks: tuple[int, ...]
    model: bytes
    prompt_tokens: int
    generated: tuple[int, ...] = ()
    first_token_sent: bool = False
    build: str = ""
    salt: bytes = b""
    last_probe_at: int = 0
    probe_after_first: bool = False


ToFrontend = Hello | Report | Retrieved | Tokens | Failed
ToWorker = Welcome | Prefill | Cancel | Release

encode = msgspec.msgpack.Encoder().encode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_handover = msgspec.msgpack.Decoder(Reserve | Decode).decode


# ---- messages that are none of the protocol's: all are counted, and one line is logged for many


_LOG_INTERVAL_NS = 10_000_000_000


class MalformedMessages:
    """Those that came in over one link. A peer that sends nothing else must not fill the log."""

    def __init__(self, log: logging.Logger, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock` in ns."""
        self._log = log
        self._clock = clock
        self._next_ns = 0
        self._suppressed = 0
        self.count = 0

    def record(self, sender: str, reason: object) -> None:
        """One from `sender` was dropped: counted, and logged unless another one was within ten seconds."""
        self.count += 1
        now = self._clock()
        if now < self._next_ns:
            self._suppressed += 1
            return
        more = f" (and {self._suppressed} more since the last such line)" if self._suppressed else ""
        self._log.warning("dropped a malformed message from %s: %s%s", sender, reason, more)
        self._next_ns, self._suppressed = now + _LOG_INTERVAL_NS, 0
