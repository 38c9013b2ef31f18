"""Where each request's time went: kept for those in flight and for the last ones that ended.

A trace has times, counts and names of workers, nothing of what was asked or answered. Its memory is bounded: so many
ended requests, so many probes of each.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from runtime.errors import InvalidRequest, UnknownRequest
from runtime.serving import stages
from runtime.serving.frontend.requests import Ended, Piece, Request
from runtime.serving.messages import Probe, ProbeOutcome, Tokens

MAX_PROBES = 256  # kept of one request; of the others only their number
RUNNING = "running"
_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")


class StageTime(msgspec.Struct, frozen=True):
    """A stage of a request, in seconds since the frontend read it."""

    name: str
    begin_s: float
    end_s: float


class ProbeTime(msgspec.Struct, frozen=True):
    """A probe: after how many tokens, when (as stages are), for how long it held the answer, how many new passages."""

    at_token: int
    begin_s: float
    end_s: float
    stalled_s: float
    passages: int
    outcome: ProbeOutcome


class Trace(msgspec.Struct, frozen=True):
    """A request as far as it has come. `state` is "running", the finish reason, or an error's code.

    `restarts` counts the workers it has outlived; then the stages are those of its last start. `probes_left_out` are
    known by their number alone.
    """

    id: str
    state: str
    prefill_worker: str
    decode_worker: str
    restarts: int
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    first_token_s: float | None
    stages: tuple[StageTime, ...]
    probes: tuple[ProbeTime, ...]
    probes_left_out: int = 0


@dataclass(slots=True)
class _Notes:
    request: Request
    stamps: dict[str, int]
    probes: list[Probe] = field(default_factory=list)
    probes_left_out: int = 0


class Traces:
    """Takes notes of every request. `keep` ended ones stay; `clock` gives monotonic ns."""

    def __init__(self, keep: int, clock: Callable[[], int]) -> None:
        self._keep, self._clock = keep, clock
        self._running: dict[str, _Notes] = {}
        self._ended: OrderedDict[str, Trace] = OrderedDict()

    def begun(self, request: Request) -> None:
        """A request was accepted."""
        self._running[request.id] = _Notes(request, {stages.RECEIVED: request.message.received_ns})

    def told(self, request: Request, piece: Piece) -> None:
        """A worker has said something of it."""
        notes = self._running.get(request.id)
        if notes is None:
            return
        notes.stamps.update(piece.stages)
        if isinstance(piece, Tokens):
            for probe in piece.probes:
                if len(notes.probes) < MAX_PROBES:
                    notes.probes.append(probe)
                else:
                    notes.probes_left_out += 1

    def ended(self, ended: Ended) -> None:
        """It has ended, in whatever way."""
        notes = self._running.pop(ended.request_id, None)
        if notes is None or not self._keep:
            return
        notes.stamps.setdefault(stages.END, self._clock())
        self._ended[ended.request_id] = _trace(notes, ended.code, notes.stamps[stages.END])
        while len(self._ended) > self._keep:
            self._ended.popitem(last=False)

    def trace(self, request_id: str) -> Trace:
        """Raises InvalidRequest for what can be no id, UnknownRequest for one that is not kept."""
        if not _ID.fullmatch(request_id):
            raise InvalidRequest("a request id has 1 to 128 letters, digits or . _ ~ -", "request_id")
        notes = self._running.get(request_id)
        if notes is not None:
            return _trace(notes, RUNNING, self._clock())
        try:
            return self._ended[request_id]
        except KeyError:
            raise UnknownRequest(
                f"no trace of request {request_id!r}: it never was, or {self._keep} others have ended since",
                "request_id",
            ) from None


def _trace(notes: _Notes, state: str, now_ns: int) -> Trace:
    request, zero = notes.request, notes.stamps[stages.RECEIVED]

    def since(moment_ns: int) -> float:
        return (moment_ns - zero) / 1e9

    first = notes.stamps.get(stages.FIRST_TOKEN)
    return Trace(
        id=request.id,
        state=state,
        prefill_worker=request.placement.prefill,
        decode_worker=request.placement.decode,
        restarts=request.attempts,
        prompt_tokens=len(request.told.prompt),
        completion_tokens=len(request.told.tokens),
        elapsed_s=since(now_ns),
        first_token_s=None if first is None else since(first),
        stages=tuple(StageTime(name, since(begin), since(end)) for name, begin, end in stages.stages_of(notes.stamps)),
        probes=tuple(
            ProbeTime(
                probe.at_token,
                since(probe.begin_ns),
                since(probe.end_ns),
                probe.stalled_ns / 1e9,
                probe.passages,
                probe.outcome,
            )
            for probe in notes.probes
        ),
        probes_left_out=notes.probes_left_out,
    )
