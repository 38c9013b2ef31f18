"""A prefill and decode workers in the test's own process, over real hand-over, with a frontend that only takes notes.

Workers step in turns and never sleep, so what happens when is up to the test. The pool is played by `FakePool`: it
answers after as many polls as the test says.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from ipc import bind
from runtime.node.config import Role, parse_config
from runtime.node.metrics import metrics_of
from runtime.node.placement import NodePlan, resolve
from runtime.node.table import WorkerTable
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import Found
from runtime.serving.decode.process import DecodeWorker
from runtime.serving.frontend.requests import Progress
from runtime.serving.kv.transport import Transport
from runtime.serving.messages import (
    Cancel,
    Failed,
    Prefill,
    Probe,
    Retrieval,
    Retrieved,
    Sampling,
    Tokens,
    Welcome,
    decode_to_frontend,
    encode,
)
from runtime.serving.prefill.process import PrefillWorker

EPOCH = 7
_MOST_ROUNDS = 50_000


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
    """Stands for a worker's retriever: passages in turn from `passages`, `polls` polls after they were asked for."""

    def __init__(self, passages: Sequence[Passage], polls: int = 1) -> None:
        self.passages, self.polls = list(passages), polls
        self.asked = 0
        self._open: dict[int, list[int]] = {}

    def ask(self, text: str, collection: str, k: int, stage: str, deadline_ns: int) -> int:
        self.asked += 1
        self._open[self.asked] = [self.polls, k]
        return self.asked

    def poll(self) -> list[Found]:
        for waiting in self._open.values():
            waiting[0] -= 1
        done = [ticket for ticket, (left, _) in self._open.items() if left <= 0]
        found = []
        for ticket in done:
            k = self._open.pop(ticket)[1]
            first = (ticket - 1) * k % len(self.passages)
            passages = tuple((self.passages * 2)[first : first + k])
            found.append(Found(ticket, passages, embedded_ns=time.monotonic_ns()))
        return found

    def cancel(self, ticket: int) -> None:
        self._open.pop(ticket, None)

    def close(self) -> None:
        pass


@dataclass
class Told:
    """What the frontend was told of a request."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    searches: list[Retrieved] = field(default_factory=list)
    last: Tokens | None = None
    failed: Failed | None = None
    probes: list[Probe] = field(default_factory=list)
    stages: list[dict[str, int]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.last is not None or self.failed is not None

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
        self._sent: dict[str, Prefill] = {}
        self._names: dict[str, str] = {}  # of later attempts → of the request
        self._latest: dict[str, str] = {}  # and back
        self._attempts = 0
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

    def lose(self, name: str) -> None:
        """A decode worker dies: nothing of it is heard again."""
        self.decodes.pop(name).close()

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
        self.told[request_id], self._sent[request_id] = Told(), message
        self.send("prefill-0", message)

    def restart(self, request_id: str, decode: str) -> None:
        """Its decode worker died: go on with another, from what was told."""
        told, message = self.told[request_id], self._sent[request_id]
        self.cancel(request_id)
        self._attempts += 1
        resume = None
        if told.tokens:
            progress = Progress(told.prompt, told.tokens, told.inserted, told.passages)
            resume = progress.resume(first_token_ns=1)
        else:
            told.searches.clear()
        name = f"{request_id}~{self._attempts}"
        self._names[name], self._latest[request_id] = request_id, name
        to = {"decode_worker": decode, "decode_endpoint": self.plan.endpoint(decode)}
        self.send("prefill-0", replace(message, request_id=name, resume=resume, **to))

    def cancel(self, request_id: str) -> None:
        for name in ("prefill-0", *self.decodes):
            self.send(name, Cancel(request_id))

    def send(self, name: str, message: Any) -> None:
        self._frontend.send_multipart([self._identities[name], encode(message)])

    def round(self) -> None:
        """One step of every worker."""
        self.prefill.step()
        for worker in list(self.decodes.values()):
            worker.step()
        while self._frontend.poll(0):
            identity, content = self._frontend.recv_multipart()
            self._take(identity, decode_to_frontend(content))

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

    def _take(self, identity: bytes, message: Any) -> None:
        name = getattr(message, "worker", None)
        if name is not None and name not in self._identities:
            self._identities[name] = identity
            self.send(name, Welcome(EPOCH))
        attempt = getattr(message, "request_id", "")
        request_id = self._names.get(attempt, attempt)
        told = self.told.get(request_id)
        if told is None or self._latest.get(request_id, request_id) != attempt:  # of an attempt that was given up
            return
        if isinstance(message, Failed):
            told.failed = message
        elif isinstance(message, Retrieved):
            told.searches.append(message)
        elif isinstance(message, Tokens):
            told.prompt = message.prompt_token_ids or told.prompt
            told.tokens += message.token_ids
            told.text += message.text
            told.probes += message.probes
            if message.stages:
                told.stages.append(message.stages)
            if message.finish_reason is not None:
                told.last = message

    def close(self) -> None:
        self.prefill.close()
        for worker in self.decodes.values():
            worker.close()
        self._frontend.close()
