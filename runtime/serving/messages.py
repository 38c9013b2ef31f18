"""Messages between the frontend and the workers: MessagePack over ZeroMQ.

The frontend binds one ROUTER socket; every prefill and decode worker connects a DEALER to it. KV blocks and search
queries use channels of their own (`ipc.handover.messages`, `ipc.session.messages`).

```
prefill, decode ── Hello, Report, Cached ─────────▶ frontend
frontend ───────── Welcome, Prefill, Cancel ──────▶ prefill
prefill ────────── Retrieved, Failed ─────────────▶ frontend
prefill ────────── offers that carry Reserve, Decode ▶ decode   (serving.kv.transport)
decode ─────────── Retrieved, Tokens, Failed ─────▶ frontend
frontend ───────── Welcome, Cancel ───────────────▶ decode
frontend ───────── ListCached, Release ───────────▶ prefill, decode
```

A request that is restarted after the loss of a worker gets a new id for the workers (`attempt_id`), so that late
messages of the previous attempt are recognized.

The frontend owns the life cycle of a request: each ends exactly once there, with a `Tokens` that has a `finish_reason`
or with a `Failed`. `Cancel` is idempotent and frees everything a worker holds for the request; the frontend also sends
it in reply to a piece of an ended request (a hand-over can overtake the first `Cancel`).
All times are `time.monotonic_ns()`, one clock for all processes of a node.
"""

from typing import Literal

import msgspec

from ipc import SearchSpec, Stage
from runtime.node.retrieval_config import ProbeMode
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.query import Query, Rerank

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode"]
ProbeOutcome = Literal["answered", "near", "late", "failed", "dropped"]
"""near: a passage in use is near enough, so nothing was inserted; dropped: the row ended before the result."""


class Retrieval(msgspec.Struct, frozen=True):
    """Retrieval of a request: `k` passages of `collection` before prefill, and a probe every `every_tokens` generated
    tokens (0: no probes).

    During a probe the row waits, or continues and inserts the passages when they arrive ("prefetch"). A probe inserts
    at most `probe_tokens` tokens of passages that the row does not have yet; 0: `PROBE_TOKENS`. `filter`: the
    attribute filter in the pools' encoding, b"" for none. `hybrid`: the weight of the keyword search, 0 for none.
    `trigger` and its `threshold`: when to probe (`triggers.py`). `flow`: of the API key
    (`SearchSpec`). `max_distance`: farther passages are left out. `quote`: the passages found before prefill are
    reported with their texts. `rerank`: of the passages found before prefill; None: they stay in the order of the
    search.
    """

    collection: str
    k: int = 4
    every_tokens: int = 0
    probe_mode: ProbeMode = "wait"
    probe_tokens: int = 0
    filter: bytes = b""
    hybrid: float = 0.0
    trigger: str = "every"
    threshold: float = 0.0
    flow: int = 0
    max_distance: float = 1e30
    quote: bool = False
    rerank: Rerank | None = None

    def query(self, text: str, stage: Stage, deadline_ns: int = 0) -> Query:
        """Return the query for passages to a text."""
        spec = SearchSpec(self.collection, self.k, stage, deadline_ns=deadline_ns, filter=self.filter, flow=self.flow)
        return Query(spec, text=text, hybrid=self.hybrid, rerank=self.rerank if stage == "prefill" else None)


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters. `temperature` 0 is greedy. `stop` strings end the text and are not part of it."""

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
    """A generation request: continue either `messages` (a chat, rendered with the model's chat template) or `prompt`
    (text or token ids) until `deadline_ns`. Requests share KV only if they have the same `salt`. The prompt is computed
    before those that were received up to `head_start_s` earlier. `expected_tokens`: of the answer, 0: unknown."""

    sampling: Sampling
    received_ns: int
    deadline_ns: int
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    retrieval: Retrieval | None = None
    salt: bytes = b""
    head_start_s: float = 0.0
    expected_tokens: int = 0


# ---- worker → frontend


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready. A decode worker accepts hand-overs at `endpoint`; `limit_tokens` bounds prompt and answer.
    `model`: the identity from which the hashes of its KV blocks are chained."""

    role: Role
    worker: str
    epoch: int
    pid: int
    slots: int
    limit_tokens: int
    endpoint: str = ""
    block_tokens: int = 0  # per KV block; 0: not reported
    blocks: int = 0
    model: bytes = b""


class Report(msgspec.Struct, frozen=True, tag=True):
    """A worker's load, sent when it changes and at least every 250 ms.

    `frontend_epoch` is that of the frontend it serves (0: none). A `draining` worker finishes its requests and accepts
    no new ones. A decode step without prompt chunks takes about `step_ns`. `cached_batch`: number of its last `Cached`,
    0 before the first. Loading a block from a tier saves the share `load_saves` of the time to compute it.
    """

    worker: str
    epoch: int
    frontend_epoch: int
    queued: int
    running: int
    free_slots: int
    draining: bool = False
    free_blocks: int = 0
    step_ns: int = 0
    cached_batch: int = 0
    load_saves: float = 0.0


class Cached(msgspec.Struct, frozen=True, tag=True):
    """Changes of the KV blocks that a worker has cached, as hashes of `kv.blocks.KEY_BYTES` bytes each.

    The batches of an epoch are numbered. One that `begins` makes all earlier ones void: the worker has only the blocks
    in it and in those that follow. After a gap the frontend sends `ListCached`.
    """

    worker: str
    epoch: int
    number: int
    begins: bool
    stored: bytes
    evicted: bytes


class Retrieved(msgspec.Struct, frozen=True, tag=True):
    """Passages found for a request: before prefill (`at_token` 0) or by a probe after `at_token` tokens. Their texts
    stay with the worker, but for those of `Retrieval.quote`: `texts`, as they stand in the prompt.

    The prefill worker sends one for every request with retrieval, before the hand-over, even if nothing was found.
    `inserted`: the tokens that a probe inserted into the context, before the token that was the last one then.
    `ranking`: see `FoundPassages`. Before prefill, `prefix_tokens` of the prompt precede the passages
    (0: there are none).
    """

    request_id: str
    passages: tuple[Passage, ...]
    at_token: int = 0
    inserted: tuple[int, ...] = ()
    stages: dict[str, int] = {}  # stamps so far, with the passages found before prefill
    texts: tuple[str, ...] = ()
    ranking: str = ""
    prefix_tokens: int = 0


class Probe(msgspec.Struct, frozen=True):
    """A completed probe of a row: sent after `at_token` tokens, it found `passages` new passages and stalled the row
    for `stalled_ns` (0 in mode "prefetch").
    """

    at_token: int
    begin_ns: int
    end_ns: int
    stalled_ns: int
    passages: int
    outcome: ProbeOutcome


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The next piece of an answer. The last one has a `finish_reason`, the usage and all stamps.

    `token_ids` are the tokens sampled since the previous piece (`text` may lag behind while a stop string is possible).
    The first piece has the stamps so far and the prompt's token ids as the model received them (3 KB and 30 µs per
    thousand): with them the answer can continue elsewhere even if its collection has been replaced since. `probes` are
    those completed since the previous piece; the latest one was sent after `last_probe_at` tokens of the answer.
    `cached_tokens`: of the prompt, whose KV was cached.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    stages: dict[str, int] = {}  # name → monotonic ns, see `stages.py`
    prompt_token_ids: tuple[int, ...] = ()
    stalled_ns: int = 0  # in the last piece: total time that probes stalled the answer
    probes: tuple[Probe, ...] = ()
    last_probe_at: int = 0
    cached_tokens: int = 0


class Taken(msgspec.Struct, frozen=True, tag=True):
    """A request's KV is saved, and decode alone continues it: prefill is done with it."""

    request_id: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request ended with an error; `code` names its class (`runtime.errors.error_from_code`)."""

    request_id: str
    code: str
    message: str
    param: str | None = None


# ---- frontend → worker


class Release(msgspec.Struct, frozen=True, tag=True):
    """A draining worker has no requests left and may exit."""


class ListCached(msgspec.Struct, frozen=True, tag=True):
    """A batch of `Cached` is missing: the worker begins anew with all its blocks."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The epoch of the frontend. The worker drops requests of any other epoch.

    It is the reply to every `Hello`, and to any message of a worker that the frontend does not know (after a restart of
    the frontend): a worker for which the epoch is new sends its `Hello` again.
    """

    frontend_epoch: int


class Resume(msgspec.Struct, frozen=True):
    """State from which an answer continues after the loss of its decode worker.

    `tokens` is the whole sequence so far: a prompt of `prompt_tokens` tokens, then the `generated` tokens and those
    that probes inserted between them. `seen_passages` are the ids of its passages; the first token left decode at
    `first_token_ns`. `last_token`, if set, is the answer's last token and not part of `tokens` and `generated`: the
    probe that it triggered was lost with the worker and is retried. The last probe before it was after `last_probe_at`
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
    """Load of a decode worker when a request is placed on it: `rows` of its `slots` are in use, a step takes `step_ns`.
    0 slots: unknown."""

    rows: int = 0
    slots: int = 0
    step_ns: int = 0


UNKNOWN_LOAD = DecodeLoad()


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Run a prompt and hand its KV over to the decode worker at `decode_endpoint`, or let that worker compute the
    prompt if it finishes no later (`decode_load`, see `prefill/job.py`).

    With `resume` no pool is queried, and the next token is sampled exactly as the lost worker would have done; messages
    and prompt are empty then.
    """

    request_id: str
    frontend_epoch: int
    generation: Generation
    decode_worker: str
    decode_endpoint: str
    resume: Resume | None = None
    decode_load: DecodeLoad = UNKNOWN_LOAD


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request and free its resources. Unknown ids are ignored."""

    request_id: str


# ---- prefill → decode, as the payload of a KV offer or announcement


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """A prompt that is being computed, until `deadline_ns` at most: of its KV `blocks`, as in `Decode`, those reported
    as written may be pulled early, into blocks that decode has to spare."""

    request_id: str
    frontend_epoch: int
    tokens: tuple[int, ...]
    deadline_ns: int
    salt: bytes = b""
    blocks: tuple[int, ...] = ()
    model: bytes = b""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Everything decode needs besides the KV: the `tokens` in it and the `first_token` that prefill sampled after them.

    `blocks` are the prefill worker's, in order, and `model` its model's identity. `saved`: the KV is in a tier instead.
    Without either there is none: decode computes it, and samples the first token unless it is given. `prompt_tokens` of
    the tokens are the prompt; `generated` are those of the answer so far, without `first_token` (empty unless the
    answer is resumed). `first_token_sent`: the client has received the first token already. `build` is the build of the
    collection that the passages are from, "" without passages; probes search the same build. The last probe of a
    resumed answer was after `last_probe_at` tokens; `probe_after_first`: the first token triggers a probe, as prefill
    has determined. The KV of `cached_tokens` of the tokens was cached where prefill computed the others.
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
    cached_tokens: int = 0
    saved: bool = False

    @property
    def has_kv(self) -> bool:
        """Whether a prefill worker has computed the KV."""
        return self.saved or bool(self.blocks)


ToFrontend = Hello | Report | Cached | Retrieved | Tokens | Taken | Failed
ToWorker = Welcome | Prefill | Cancel | Release | ListCached

encode = msgspec.msgpack.Encoder().encode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_handover = msgspec.msgpack.Decoder(Reserve | Decode).decode
