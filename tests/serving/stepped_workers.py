"""Prefill and decode workers in the caller's process, with the real hand-over between them.

The workers are stepped alternately and never sleep: the caller, who acts as their frontend, determines the order of
events.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from ipc import bind
from runtime.node.config import parse_config
from runtime.node.metrics.kinds import Counter, Gauge
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.layout import lay_out
from runtime.node.worker import Worker
from runtime.serving.decode.handover_queue import SLICE_NS, WAITING_SHARE
from runtime.serving.decode.process import DecodeWorker
from runtime.serving.kv.transport import Transport
from runtime.serving.messages import (
    Generation,
    Hello,
    Prefill,
    Sampling,
    ToFrontend,
    Welcome,
    decode_to_frontend,
    encode,
)
from runtime.serving.prefill.process import PrefillWorker
from runtime.testing.worker import make_worker

EPOCH = 7
_WAIT_MS = 20_000  # timeout for messages that have been sent


class SteppedWorkers:
    """`decodes` decode workers and one prefill worker of a model, configured by TOML sections. `transport` overrides
    the default of their devices, `slice_ns` and `waiting_share` those of decode workers."""

    def __init__(
        self,
        model: Path,
        *,
        context: int = 512,
        block: int = 8,
        decodes: int = 1,
        transport: Transport | None = None,
        weights: str = "auto",
        slice_ns: int = SLICE_NS,
        waiting_share: float = WAITING_SHARE,
        **sections: Any,
    ) -> None:
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
    ) -> Prefill:
        """Send a request for exactly so many tokens to prefill. `more`: `sampling` as a dict, `retrieval`, and other
        fields of the message."""
        sampling = Sampling(max_tokens, ignore_eos=True, **more.pop("sampling", {}))
        salt = more.pop("salt", b"")
        retrieval, head_start_s = more.pop("retrieval", None), more.pop("head_start_s", 0.0)
        generation = Generation(sampling, 1, deadline_ns, (), tuple(prompt), retrieval, salt, head_start_s)
        message = Prefill(request_id, EPOCH, generation, decode, self.plan.endpoint(decode), **more)
        self.send("prefill-0", message)
        return message

    def send(self, name: str, message: Any) -> None:
        self._frontend.send_multipart([self._identities[name], encode(message)])

    def round(self) -> None:
        """Step every worker once."""
        self.prefill.step()
        for worker in list(self.decodes.values()):
            worker.step()
        self.receive()

    def receive(self) -> None:
        """Receive the workers' messages."""
        while self._frontend.poll(0):
            identity, content = self._frontend.recv_multipart()
            message = decode_to_frontend(content)
            if isinstance(message, Hello) and message.worker not in self._identities:
                self.identity = message.model
                self._identities[message.worker] = identity
                self.send(message.worker, Welcome(EPOCH))
            self.handle(message)

    def handle(self, message: ToFrontend) -> None:
        """Handle a worker's message; does nothing by default."""

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

    def close(self) -> None:
        self.prefill.close()
        for worker in self.decodes.values():
            worker.close()
        self._frontend.close()
