"""Workers stepped alternately, with the frontend's request table, recorded answers and injected faults.

A test also decides which messages are in flight when a worker dies. Consumers only record answers. `FakePool` replaces
the pool: it answers after a number of polls set by the test.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import zmq
from msgspec.structs import replace

from ipc import bind
from runtime.errors import TrinityError, error_from_code
from runtime.node.config import parse_config
from runtime.node.metrics.kinds import Counter, Gauge
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.layout import lay_out
from runtime.node.worker import Worker
from runtime.retrieval.passages import Passage
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.search.query import Query
from runtime.serving.decode.handover_queue import SLICE_NS, WAITING_SHARE
from runtime.serving.decode.process import DecodeWorker
from runtime.serving.frontend.requests import ClientDisconnected, Piece, Request, RequestTable
from runtime.serving.frontend.router import Placement
from runtime.serving.kv.transport import Transport
from runtime.serving.messages import (
    Cached,
    Cancel,
    Failed,
    Generation,
    Hello,
    Prefill,
    Probe,
    Report,
    Retrieved,
    Sampling,
    Taken,
    ToFrontend,
    Tokens,
    Welcome,
    decode_to_frontend,
    encode,
)
from runtime.serving.prefill.process import PrefillWorker
from runtime.testing.worker import make_worker

EPOCH = 7
VOCABULARY = 259
PASSAGES = [Passage(f"p{n}", f"Title {n}", 0.1 * n, f"What passage {n} says of it.") for n in range(12)]
_WAIT_MS = 20_000  # timeout for messages that have been sent
_MOST_ROUNDS = 50_000


class FakePool:
    """Fake of a worker's retriever: returns `passages`, in order or chosen by the text (`by_text`), `polls` polls after
    the request."""

    def __init__(self, passages: Sequence[Passage], polls: int = 1, *, by_text: bool = False) -> None:
        self.passages, self.polls, self._by_text = list(passages), polls, by_text
        self.request_count = 0
        self._open: dict[int, list[int]] = {}

    def submit(self, query: Query, build: str = "") -> int:
        self.request_count += 1
        k = query.spec.k
        place = crc32(query.text.encode()) if self._by_text else (self.request_count - 1) * k
        self._open[self.request_count] = [self.polls, k, place % len(self.passages)]
        return self.request_count

    def poll(self) -> list[RetrievalResult]:
        for waiting in self._open.values():
            waiting[0] -= 1
        done = [ticket for ticket, (left, *_) in self._open.items() if left <= 0]
        found = []
        for ticket in done:
            _, k, first = self._open.pop(ticket)
            passages = tuple((self.passages * 2)[first : first + k])
            found.append(RetrievalResult(ticket, passages, embedded_ns=time.monotonic_ns()))
        return found

    def cancel(self, ticket: int) -> None:
        self._open.pop(ticket, None)

    def sleep(self, sockets: Sequence[Any], timeout_ms: float) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Output:
    """Everything the consumer of a request received."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    searches: list[Retrieved] = field(default_factory=list)
    last: Tokens | None = None
    failed: TrinityError | None = None
    probes: list[Probe] = field(default_factory=list)
    stages: list[dict[str, int]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.last is not None or self.failed is not None

    def add(self, piece: Piece | TrinityError) -> None:
        if isinstance(piece, TrinityError):
            self.failed = piece
        elif isinstance(piece, Retrieved):
            self.searches.append(piece)
        else:
            self.prompt = piece.prompt_token_ids or self.prompt
            self.tokens += piece.token_ids
            self.text += piece.text
            self.probes += piece.probes
            if piece.stages:
                self.stages.append(piece.stages)
            if piece.finish_reason is not None:
                self.last = piece

    @property
    def inserted(self) -> dict[int, tuple[int, ...]]:
        return {search.at_token: search.inserted for search in self.searches if search.inserted}

    @property
    def passages(self) -> list[str]:
        return [passage.id for search in self.searches for passage in search.passages]

    def sequence(self, generated: int) -> list[int]:
        """Return the context from which token number `generated` (from 0) was sampled: prompt, answer, and passages
        that probes inserted before the last token at that time."""
        context, inserted = list(self.prompt), self.inserted
        for number, token in enumerate(self.tokens[:generated], start=1):
            context += [*inserted.get(number, ()), token]
        return context


class _RecordedRequest(Request):
    """A request whose consumer records every piece at once."""

    def __init__(self, message: Prefill, output: Output) -> None:
        super().__init__(message.request_id, message.generation)
        self._output = output

    def put(self, piece: Piece | TrinityError) -> None:
        self._output.add(piece)


class Workers:
    """Prefill and decode workers in the caller's process, with the real hand-over between them.

    `decodes` decode workers and one prefill worker of a model, configured by TOML sections. `transport` overrides the
    default of their devices, `slice_ns` and `waiting_share` those of decode workers. They are stepped alternately and
    never sleep: the caller, who acts as their frontend, determines the order of events.
    """

    def __init__(
        self,
        model: Path,
        *,
        context: int = 512,
        block: int = 8,
        decodes: int = 1,
        transport: Transport | None = None,
        weights: str = "float32",
        slice_ns: int = SLICE_NS,
        waiting_share: float = WAITING_SHARE,
        **sections: Any,
    ) -> None:
        self.ended: list[str] = []  # ids in the order in which their requests ended
        self._table = RequestTable(lambda outcome, request: self.ended.append(request.id))
        self._requests: dict[str, Request] = {}  # including ended ones
        self._late: list[ToFrontend] = []  # messages of a dead worker that were not received yet
        self.outputs: dict[str, Output] = {}
        self.cached: list[Cached] = []
        self._transport, self._slice_ns, self._waiting_share = transport, slice_ns, waiting_share
        raw = {"model": {"name": str(model), "weights": weights, "context_tokens": context}, **sections}
        raw.setdefault("kv", {"host_mib": 0})  # isolates tests from each other
        raw["decode"] = {"workers": decodes, **sections.get("decode", {})}
        self.plan = replace(lay_out(parse_config(raw)), block_tokens=block)
        self._frontend = bind(zmq.ROUTER, self.plan.endpoint("frontend"), max_message_bytes=1 << 24)
        self._identities: dict[str, bytes] = {}
        self.identity = b""  # of the model
        self.decodes: dict[str, DecodeWorker] = {}
        self.tables: dict[str, WorkerTable] = {}
        self.prefill = PrefillWorker(self._worker("prefill-0"), transport, idle_ms=0)
        for number in range(decodes):
            self.start_decode(f"decode-{number}")
        while len(self._identities) < 1 + decodes:
            self.round()

    def _worker(self, name: str) -> Worker:
        worker = make_worker(self.plan, name)
        self.tables[name] = worker.table
        return worker

    def metric(self, name: str, metric: Counter | Gauge) -> float:
        """Return a metric of a worker as of its last step."""
        return self.tables[name].value(metric)

    def start_decode(self, name: str) -> None:
        self.decodes[name] = DecodeWorker(self._worker(name), self._transport, 0, self._slice_ns, self._waiting_share)

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        decode: str = "decode-0",
        deadline_ns: int = 1 << 62,
        **more: Any,
    ) -> None:
        """Send a request for exactly so many tokens to prefill. `more`: `sampling` as a dict, `retrieval`, and other
        fields of the message."""
        sampling = Sampling(max_tokens, ignore_eos=True, **more.pop("sampling", {}))
        salt = more.pop("salt", b"")
        retrieval, head_start_s = more.pop("retrieval", None), more.pop("head_start_s", 0.0)
        generation = Generation(sampling, 1, deadline_ns, (), tuple(prompt), retrieval, salt, head_start_s)
        message = Prefill(request_id, EPOCH, generation, decode, self.plan.endpoint(decode), **more)
        self.send("prefill-0", message)
        self.outputs[request_id] = Output()
        self._requests[request_id] = request = _RecordedRequest(message, self.outputs[request_id])
        self._table.open(request)

    def send(self, name: str, message: Any) -> None:
        self._frontend.send_multipart([self._identities[name], encode(message)])

    def round(self) -> None:
        """Step every worker once."""
        self.prefill.step()
        for worker in list(self.decodes.values()):
            worker.step()
        self.receive()

    def receive(self) -> None:
        """Receive messages of the workers."""
        late, self._late = self._late, []
        for message in late:
            self._handle(message)
        while self._frontend.poll(0):
            identity, content = self._frontend.recv_multipart()
            message = decode_to_frontend(content)
            if isinstance(message, Hello) and message.worker not in self._identities:
                self.identity = message.model
                self._identities[message.worker] = identity
                self.send(message.worker, Welcome(EPOCH))
            self._handle(message)

    def offer(self, *request_ids: str, decode: str = "decode-0") -> None:
        """Step prefill until it has offered the KV of all these requests and `decode` can read the offers."""
        wanted = set(request_ids)
        while not wanted <= {job.id for job in self.prefill._offered.values()}:
            self.prefill.step()
        assert self.decodes[decode]._sink.socket.poll(_WAIT_MS), "an offer that was sent arrives"

    def held(self) -> dict[str, tuple[int, int]]:
        """Return, by worker, the KV blocks in use, and prefill's leases in use."""
        leases = self.plan.config.prefill.slots - self.prefill._source.free_leases
        taken = {"prefill-0": (self.prefill._blocks.held, leases)}
        for name, worker in self.decodes.items():
            taken[name] = (worker._blocks.held, 0)
        return taken

    def lose(self, name: str, undelivered: int = 0) -> None:
        """Kill a decode worker. Messages of its last `undelivered` steps arrive after its death is known."""
        worker = self.decodes.pop(name)
        worker.link.send = lambda message: self._late.append(message)  # type: ignore[method-assign]
        for _ in range(undelivered):
            worker.step()
        worker.close()

    def play_pool(self, prefill: FakePool, decode: FakePool) -> None:
        self.prefill.retriever.close()
        self.prefill.retriever = prefill  # type: ignore[assignment]
        for worker in self.decodes.values():
            worker.probes.retriever = decode  # type: ignore[assignment]

    def restart(self, request_id: str, decode: str) -> None:
        """Continue on another decode worker after the death of the first, from the reported tokens."""
        request = self._requests[request_id]
        self._call_off(request)
        self._table.start_attempt(request)
        placement = Placement("prefill-0", decode, self.plan.endpoint(decode))
        self.send("prefill-0", request.message(EPOCH, placement, request.resume()))

    def cancel(self, request_id: str) -> None:
        request = self._requests[request_id]
        self._call_off(request)
        self._table.fail(request, ClientDisconnected("nobody waits for it"))

    def _call_off(self, request: Request) -> None:
        for name in ("prefill-0", *self.decodes):
            self.send(name, Cancel(request.attempt_id))

    def run(self) -> None:
        """Run until all requests have ended."""
        for _ in range(_MOST_ROUNDS):
            if all(output.ended for output in self.outputs.values()):
                return
            self.round()
        raise AssertionError(f"not ended: {[name for name, output in self.outputs.items() if not output.ended]}")

    def settle(self) -> None:
        """Run until the workers hold no resources."""
        for _ in range(_MOST_ROUNDS):
            if not self.prefill.busy and not any(worker.busy for worker in self.decodes.values()):
                return
            self.round()
        raise AssertionError("workers still hold requests")

    def assert_nothing_held(self) -> None:
        """Check that the workers release all resources."""
        self.settle()
        assert set(self.held().values()) == {(0, 0)}

    def _handle(self, message: ToFrontend) -> None:
        if isinstance(message, Cached):
            self.cached.append(message)
        if isinstance(message, Hello | Report | Cached):
            return
        request = self._table.get(message.request_id)
        if request is not None and isinstance(message, Failed):
            self._table.fail(request, error_from_code(message.code, message.message, message.param))
        elif request is not None and not isinstance(message, Failed | Taken):
            request.first_token_ns = request.first_token_ns or 1
            self._table.deliver(message)

    def close(self) -> None:
        self.prefill.close()
        for worker in self.decodes.values():
            worker.close()
        self._frontend.close()


Start = Callable[..., Workers]
"""Starts workers with these options; they end with the test."""


def ragged(count: int, seed: int, longest: int = 150) -> list[list[int]]:
    """Return prompts of all lengths, a third of them with one of three common prefixes."""
    random = np.random.default_rng(seed)
    beginnings = [random.integers(0, VOCABULARY, size).tolist() for size in (40, 64, 90)]
    prompts = []
    for number in range(count):
        size = int(np.exp(random.uniform(0, np.log(longest))))
        own = random.integers(0, VOCABULARY, max(1, size)).tolist()
        prompts.append([*beginnings[number % 9 // 3], *own] if number % 3 == 0 else own)
    return prompts
