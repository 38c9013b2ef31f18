"""A prefill and decode workers in the test's own process, over real hand-over, with the frontend's table of requests.

Workers step in turns and never sleep, so what happens when is up to the test; also what is still on its way when a
worker dies. Who consumes the answers only takes notes. The pool is played by `FakePool`: it answers after as many polls
as the test says.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import zmq
from msgspec.structs import replace

from ipc import bind
from runtime.errors import TrinityError, error_of
from runtime.node.config import Role, parse_config
from runtime.node.metrics import metrics_of
from runtime.node.placement import NodePlan, resolve
from runtime.node.table import WorkerTable
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import Found
from runtime.serving.decode.process import DecodeWorker
from runtime.serving.frontend.requests import ClientGone, Piece, Request, RequestTable
from runtime.serving.frontend.router import Placement
from runtime.serving.kv.transport import Transport
from runtime.serving.messages import (
    Cancel,
    Failed,
    Hello,
    Prefill,
    Probe,
    Report,
    Retrieval,
    Retrieved,
    Sampling,
    ToFrontend,
    Tokens,
    Welcome,
    decode_to_frontend,
    encode,
)
from runtime.serving.prefill.process import PrefillWorker

EPOCH = 7
_MOST_ROUNDS = 50_000
_WAIT_MS = 20_000  # for a message that has been sent


class FakeWorker:
    """What a role's loop is handed."""

    def __init__(self, plan: NodePlan, name: str) -> None:
        self.plan, self.name = plan, name
        self.place = next(worker for worker in plan.workers if worker.name == name)
        self.epoch, self.pid, self.stopping = 1, os.getpid(), False
        role: Role = "prefill" if name.startswith("prefill") else "decode"
        self.table = WorkerTable.create(role, name, metrics_of(role, plan.config.slo))
        self.log = logging.getLogger(name)


class FakePool:
    """Stands for a worker's retriever: passages from `passages`, in turn or as the text has it (`by_text`), `polls`
    polls after they were asked for."""

    def __init__(self, passages: Sequence[Passage], polls: int = 1, *, by_text: bool = False) -> None:
        self.passages, self.polls, self._by_text = list(passages), polls, by_text
        self.asked = 0
        self._open: dict[int, list[int]] = {}

    def ask(self, text: str, collection: str, k: int, stage: str, deadline_ns: int) -> int:
        self.asked += 1
        place = crc32(text.encode()) if self._by_text else (self.asked - 1) * k
        self._open[self.asked] = [self.polls, k, place % len(self.passages)]
        return self.asked

    def poll(self) -> list[Found]:
        for waiting in self._open.values():
            waiting[0] -= 1
        done = [ticket for ticket, (left, *_) in self._open.items() if left <= 0]
        found = []
        for ticket in done:
            _, k, first = self._open.pop(ticket)
            passages = tuple((self.passages * 2)[first : first + k])
            found.append(Found(ticket, passages, embedded_ns=time.monotonic_ns()))
        return found

    def cancel(self, ticket: int) -> None:
        self._open.pop(ticket, None)

    def close(self) -> None:
        pass


@dataclass
class Told:
    """What the consumer of a request was given."""

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
        """The context from which token number `generated` (from 0) was drawn: prompt, answer, and what probes
        inserted before the then last token."""
        context, inserted = list(self.prompt), self.inserted
        for number, token in enumerate(self.tokens[:generated], start=1):
            context += [*inserted.get(number, ()), token]
        return context


class _Noted(Request):
    """A request whose consumer notes every piece at once."""

    def __init__(self, message: Prefill, notes: Told) -> None:
        super().__init__(message, Placement("", "", ""))
        self._notes = notes

    def put(self, piece: Piece | TrinityError) -> None:
        self._notes.add(piece)


class Workers:
    """`decodes` decode workers and one prefill worker of a model, configured by TOML tables.

    `transport`: theirs, in place of that of their devices.
    """

    def __init__(
        self,
        model: Path,
        *,
        context: int = 512,
        block: int = 8,
        decodes: int = 1,
        transport: Transport | None = None,
        **sections: Any,
    ) -> None:
        self._transport = transport
        raw = {"model": {"name": str(model), "context_tokens": context, "kv_block_tokens": block}, **sections}
        raw["decode"] = {"workers": decodes, **sections.get("decode", {})}
        self.plan = resolve(parse_config(raw))
        self._frontend = bind(zmq.ROUTER, self.plan.endpoint("frontend"), max_message_bytes=1 << 24)
        self._identities: dict[str, bytes] = {}
        self._table = RequestTable(lambda ended, request: None)
        self._requests: dict[str, Request] = {}  # ended ones too
        self._late: list[ToFrontend] = []  # what a worker said before it died, and nobody has heard yet
        self.told: dict[str, Told] = {}
        self.decodes: dict[str, DecodeWorker] = {}
        self.prefill = PrefillWorker(FakeWorker(self.plan, "prefill-0"), transport)  # type: ignore[arg-type]
        self.prefill._sleep = lambda: None  # type: ignore[method-assign]
        for number in range(decodes):
            self.start_decode(f"decode-{number}")
        while len(self._identities) < 1 + decodes:
            self.round()

    def start_decode(self, name: str) -> None:
        worker = DecodeWorker(FakeWorker(self.plan, name), self._transport)  # type: ignore[arg-type]
        worker._sleep = lambda: None  # type: ignore[method-assign]
        self.decodes[name] = worker

    def lose(self, name: str, unheard: int = 0) -> None:
        """A decode worker dies. What it says in `unheard` last steps comes in when its death is known already."""
        worker = self.decodes.pop(name)
        worker._link.send = lambda message: self._late.append(message)  # type: ignore[method-assign]
        for _ in range(unheard):
            worker.step()
        worker.close()

    def play_pool(self, prefill: FakePool, decode: FakePool) -> None:
        self.prefill._retriever.close()
        self.prefill._retriever = prefill  # type: ignore[assignment]
        for worker in self.decodes.values():
            worker._probes._retriever = decode  # type: ignore[assignment]

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        decode: str = "decode-0",
        retrieval: Retrieval | None = None,
        deadline_ns: int = 1 << 62,
        **more: Any,
    ) -> None:
        sampling = Sampling(max_tokens, ignore_eos=True, **more.pop("sampling", {}))
        message = Prefill(
            request_id, EPOCH, sampling, decode, self.plan.endpoint(decode), 1, deadline_ns,
            prompt=tuple(prompt), retrieval=retrieval, **more,
        )  # fmt: skip
        self.told[request_id] = Told()
        self._requests[request_id] = request = _Noted(message, self.told[request_id])
        self._table.open(request)
        self.send("prefill-0", message)

    def restart(self, request_id: str, decode: str) -> None:
        """Its decode worker died: go on with another, from what was told."""
        request = self._requests[request_id]
        self._call_off(request)
        self._table.renew(request)
        to = {"decode_worker": decode, "decode_endpoint": self.plan.endpoint(decode)}
        self.send("prefill-0", replace(request.next_message(), **to))

    def cancel(self, request_id: str) -> None:
        request = self._requests[request_id]
        self._call_off(request)
        self._table.fail(request, ClientGone("nobody waits for it"))

    def _call_off(self, request: Request) -> None:
        for name in ("prefill-0", *self.decodes):
            self.send(name, Cancel(request.attempt_id))

    def send(self, name: str, message: Any) -> None:
        self._frontend.send_multipart([self._identities[name], encode(message)])

    def round(self) -> None:
        """One step of every worker."""
        self.prefill.step()
        for worker in list(self.decodes.values()):
            worker.step()
        late, self._late = self._late, []
        for message in late:
            self._take(message)
        while self._frontend.poll(0):
            identity, content = self._frontend.recv_multipart()
            message = decode_to_frontend(content)
            if isinstance(message, Hello) and message.worker not in self._identities:
                self._identities[message.worker] = identity
                self.send(message.worker, Welcome(EPOCH))
            self._take(message)

    def offer(self, request_id: str, decode: str = "decode-0") -> None:
        """Prefill alone goes on until it has offered this request's KV and the offer can be read by `decode`."""
        while request_id not in [job.id for job in self.prefill._offered.values()]:
            self.prefill.step()
        assert self.decodes[decode]._sink.socket.poll(_WAIT_MS), "an offer that was sent arrives"

    def run(self) -> None:
        """Until all requests have ended."""
        for _ in range(_MOST_ROUNDS):
            if all(told.ended for told in self.told.values()):
                return
            self.round()
        raise AssertionError(f"not ended: {[name for name, told in self.told.items() if not told.ended]}")

    def settle(self) -> None:
        """Until the workers hold nothing any more."""
        for _ in range(_MOST_ROUNDS):
            if not self.prefill.busy and not any(worker.busy for worker in self.decodes.values()):
                return
            self.round()
        raise AssertionError("workers still hold requests")

    def _take(self, message: ToFrontend) -> None:
        if isinstance(message, Hello | Report):
            return
        request = self._table.get(message.request_id)
        if request is not None and isinstance(message, Failed):
            self._table.fail(request, error_of(message.code, message.message, message.param))
        elif request is not None and not isinstance(message, Failed):
            request.first_token_ns = request.first_token_ns or 1
            self._table.deliver(message)

    def close(self) -> None:
        self.prefill.close()
        for worker in self.decodes.values():
            worker.close()
        self._frontend.close()
