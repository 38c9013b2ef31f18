"""What the frontend stands on: an engine that writes answers. `runtime.engines` has them.

A request goes in with an id and a deadline, its answer comes back as pieces (`Request.next`), and it ends exactly once.
With `retrieval` the engine has the passages in the prompt before the first token; with `retrieval.every_tokens` it
appends to the running answer what its probes bring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.errors import TrinityError
from runtime.serving.frontend.requests import Request
from runtime.serving.frontend.traces import Traces
from runtime.serving.messages import Message, Retrieval, Sampling


class EngineStatistics(Protocol):
    """`restarts` counts how often requests were started again after what ran them was lost, `malformed` the messages of
    the node's own workers that were none."""

    @property
    def in_flight(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    @property
    def malformed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`forwards`: takes OpenAI's bodies as they are sent, with fields that Trinity does not know; its pieces are
    `Relayed` then."""

    forwards: bool = False


class Engine(Protocol):
    """Lives in one event loop. `epoch` is this process's own, not 0; `traces` has where each request's time went."""

    epoch: int
    traces: Traces
    capabilities: Capabilities

    def now_ns(self) -> int:
        """The clock in which deadlines are given."""

    def missing(self) -> Sequence[str]:
        """What is not there to answer with, by name; empty when requests are taken."""

    def submit(
        self,
        request_id: str,
        *,
        sampling: Sampling,
        received_ns: int,
        deadline_ns: int,
        prompt: str | tuple[int, ...] = "",
        messages: Sequence[Message] = (),
        retrieval: Retrieval | None = None,
        client_id: str = "",
        sent: Mapping[str, Any] | None = None,
    ) -> Request:
        """Begin an answer to `messages` (a chat) or `prompt`; ids must be new ones. `client_id` is the client's own
        name for it, `sent` its body, which engines that forward send on.

        Raises Overloaded, Unavailable, or InvalidRequest for what this engine cannot do; nothing was accepted then.
        """

    def cancel(self, request: Request) -> None:
        """The consumer is gone: free all that the request holds. Does nothing when it has ended."""

    def end_all(self, error: TrinityError) -> None:
        """End every request that is in flight with `error`: the drain is over."""

    def statistics(self) -> EngineStatistics:
        """A snapshot of its counters."""

    async def run(self) -> None:
        """Serve until cancelled; requests still in flight then end with WorkerLost."""

    def close(self) -> None:
        """Close what is open; nothing is waited for."""
