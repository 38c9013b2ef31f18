"""Relay of an answer: turns a server's chunks into the client's, over all requests in which the answer is written."""

from collections.abc import Callable
from typing import Any

from runtime.engines.openai.continuation import Transcript
from runtime.errors import EngineFailed, InvalidRequest
from runtime.serving import stages
from runtime.serving.frontend.requests import Relayed
from runtime.serving.messages import Probe
from runtime.serving.model.text import StopStrings

Json = dict[str, Any]

_REPLACEMENT = "\ufffd"  # servers send it for a character whose bytes are incomplete
_NOT_EXTRA = ("role", "content")
_MAX_INT = 2**31 - 1  # of token ids and token counts
_COUNTS = ("prompt_tokens", "completion_tokens")


class Relay:
    """Relays an answer's chunks: `feed` takes the server's, `emit` gets the client's. `clock` returns monotonic ns.

    `chat`: the client requested a chat; `stops`: stop strings detected here, because one may span two requests. With
    `whole_characters`, tokens that end within a character are held back until the character is complete, so that no
    request continues from half a character.
    """

    def __init__(
        self,
        request_id: str,
        emit: Callable[[Relayed], object],
        clock: Callable[[], int],
        *,
        chat: bool,
        body: Json,
        stops: tuple[str, ...] = (),
    ) -> None:
        self._id, self._emit, self._clock = request_id, emit, clock
        self._chat = chat
        self._ids_requested = bool(body.get("return_token_ids"))
        self._logprobs_requested = body.get("logprobs") not in (None, False)
        self._choices = int(body.get("n", 1))
        self._stops = StopStrings(stops)
        self.whole_characters = False
        self.transcript = Transcript()
        self.stamps: dict[str, int] = {}
        self.probes: list[Probe] = []  # ended, to be sent with the next piece
        self.stalled_ns = 0
        self.sent_tokens = 0  # tokens of the first choice; pieces if the server returns no token ids
        self._prompt_tokens = 0
        self._prompt_details: Json = {}
        self.sent_tokens_before = 0  # `sent_tokens` at the start of the current request
        self._last: tuple[str, list[int]] = ("", [])
        self.usage: Json | None = None  # of the current request
        self.requests = 0
        self._held: list[tuple[Json, str, list[int]]] = []
        self._finished: dict[int, Json] = {}
        self.ended = False

    # ---- one request

    def begin(self) -> None:
        """Start another request. Text that was held back is dropped: the request continues from before it."""
        if self.requests == 1 and self.usage:
            self._prompt_tokens = int(self.usage.get("prompt_tokens", 0))
            self._prompt_details = {name: self.usage[name] for name in ("prompt_tokens_details",) if name in self.usage}
        self._held.clear()
        self._finished.clear()
        self.sent_tokens_before = self.sent_tokens
        self.usage = None
        self.requests += 1

    @property
    def finish_reason(self) -> str | None:
        """The first choice's finish reason; None before its end."""
        choice = self._finished.get(0)
        return None if choice is None else str(choice["finish_reason"])

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.stopped

    def feed(self, chunk: Json) -> None:
        """Process a chunk. Raises InvalidRequest if it lacks a requested field, EngineFailed if it is malformed."""
        try:
            self._feed(chunk)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"the engine's stream has a malformed chunk: {error}") from error

    def _feed(self, chunk: Json) -> None:
        if usage := chunk.get("usage"):
            self.usage = usage | {name: _count(usage[name]) for name in _COUNTS}
        if self.transcript.prompt_ids is None and (ids := _ids(chunk.get("prompt_token_ids"))):
            self.transcript.prompt_ids = ids
        parts = []
        for choice in chunk.get("choices") or ():
            if self.transcript.prompt_ids is None and (ids := _ids(choice.get("prompt_token_ids"))):
                self.transcript.prompt_ids = ids
            if (part := self._convert(choice)) is not None:
                parts.append(part)
        if parts:
            self._forward(parts)

    def _convert(self, choice: Json) -> tuple[Json, str, list[int]] | None:
        """Return the choice in the client endpoint's format, its text and its tokens; None if nothing is to be sent."""
        choice.pop("prompt_token_ids", None)
        ids = _ids(choice.get("token_ids"))
        if not self._ids_requested:
            choice.pop("token_ids", None)
        if self._chat and "text" in choice:  # a chat that continues as a completion
            choice["delta"] = {"content": choice.pop("text")}
        index = choice.setdefault("index", 0)
        if not isinstance(index, int) or not 0 <= index < self._choices:
            raise ValueError(f"a choice has the index {index!r}, but {self._choices} were requested")
        delta = choice.get("delta")
        if self._chat and delta is None:
            delta = choice["delta"] = {}
        text = (choice.get("text") if delta is None else delta.get("content")) or ""
        if not isinstance(text, str):
            raise TypeError(f"its text is {type(text).__name__}")
        has_content = bool(text or ids) or (
            delta is not None and any(delta[name] for name in delta if name not in _NOT_EXTRA)
        )
        if has_content and self._logprobs_requested and choice.get("logprobs") is None and text:
            raise InvalidRequest("logprobs: the engine does not return any; leave it out", "logprobs")
        if (reason := choice.get("finish_reason")) is not None:
            if not isinstance(reason, str):
                raise TypeError(f"its finish_reason is {type(reason).__name__}")
            self._finished[index] = choice
            if index == 0:  # sent at the end: the usage follows it
                self._last = (text, ids)
                return None
        elif not has_content and index == 0:
            return None  # the role alone: the answer's opening has it
        return (choice, text, ids) if index == 0 else (choice, "", [])

    def _forward(self, parts: list[tuple[Json, str, list[int]]]) -> None:
        if self.whole_characters:
            self._held += parts
            if not any(self._is_whole(choice, text) for choice, text, _ in parts):
                return
            parts, self._held = self._held, []
        self._send(parts)

    def _is_whole(self, choice: Json, text: str) -> bool:
        if text:
            return not text.endswith(_REPLACEMENT)
        delta = choice.get("delta") or {}
        return any(delta[name] for name in delta if name not in _NOT_EXTRA)

    # ---- output

    def _send(self, parts: list[tuple[Json, str, list[int]]]) -> None:
        text, written, ids, choices = "", "", list[int](), list[Json]()
        for choice, piece, tokens in parts:
            passed = self._stops.push(piece)
            if passed != piece:
                _set_text(choice, passed)
            text += passed
            written += piece
            ids += tokens
            choices.append(choice)
            self.sent_tokens += len(tokens) or int(bool(piece))
            if self._stops.stopped:
                break
        self.transcript.add(written, ids)  # including the start of a possible stop string: the model has written it
        now = self._clock()
        first = stages.FIRST_TOKEN not in self.stamps
        if first:
            self.stamps[stages.PREFILL_END] = self.stamps[stages.FIRST_TOKEN] = now
        self._emit(
            Relayed(
                self._id,
                text,
                tuple(ids),
                prompt_tokens=self._prompt_count(),
                completion_tokens=self._completion_count(),
                stages=dict(self.stamps) if first else {},
                prompt_token_ids=tuple(self.transcript.prompt_ids or ()) if first else (),
                probes=self._take_probes(),
                choices=tuple(choices),
            )
        )

    def pause(self, made: int) -> None:
        """End a request after `made` tokens, up to its last whole character; the answer continues in another."""
        choice = self._finished.pop(0)
        choice["finish_reason"] = None
        text, ids = self._last
        if text or ids:
            self._forward([(choice, text, ids)])
        if self.sent_tokens == self.sent_tokens_before:
            self.flush()  # sends half a character: otherwise the answer would never advance
        if not self.whole_characters:
            self.sent_tokens = self.sent_tokens_before + made  # without token ids, a piece may hold several tokens

    def flush(self) -> None:
        """Send what was held back."""
        parts, self._held = self._held, []
        if parts:
            self._send(parts)

    def end(self, finish_reason: str | None = None) -> None:
        """End the answer, with the server's finish reasons or this one. Raises InvalidRequest for missing choices."""
        if finish_reason is None:
            if len(self._finished) < self._choices or 0 not in self._finished:
                made = len(self._finished)
                raise InvalidRequest(
                    f"n = {self._choices}: the engine wrote only {made} of the choices; leave n out", "n"
                )
            last = self._finished[0]
            self.flush()
            text, ids = self._last
        else:
            last, text, ids = Json(index=0, logprobs=None, finish_reason=finish_reason), "", []
            last["delta" if self._chat else "text"] = {} if self._chat else ""
        passed = self._stops.push(text)
        if self._stops.stopped:
            last["finish_reason"] = "stop"
        else:
            passed += self._stops.flush()
        if passed != text:
            _set_text(last, passed)
        self.sent_tokens += len(ids) or int(bool(text))
        self.transcript.add(passed, ids)
        now = self.stamps[stages.END] = self._clock()
        if stages.FIRST_TOKEN not in self.stamps:  # an answer without a token
            self.stamps[stages.PREFILL_END] = self.stamps[stages.FIRST_TOKEN] = now
        reasons = {choice["finish_reason"] for choice in (*self._finished.values(), last)}
        usage = self._total_usage()
        self.ended = True
        self._emit(
            Relayed(
                self._id,
                passed,
                tuple(ids),
                "length" if "length" in reasons else "stop",
                int(usage.get("prompt_tokens", 0)) if usage else 0,
                self.stamps,
                tuple(self.transcript.prompt_ids or ()) if not self.sent_tokens else (),
                self.stalled_ns,
                self._take_probes(),
                choices=(last,),
                usage=usage,
                completion_tokens=int(usage.get("completion_tokens", self.sent_tokens)) if usage else self.sent_tokens,
                cached_tokens=_cached_tokens(usage or {}),
            )
        )

    def _total_usage(self) -> Json | None:
        """The server's usage; over several requests the first one's prompt tokens and all tokens sent."""
        if self.usage is not None and self.requests == 1:
            return self.usage
        prompt = self._prompt_count()
        if not prompt:
            return None
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.sent_tokens,
            "total_tokens": prompt + self.sent_tokens,
            **self._prompt_details,
        }

    def _prompt_count(self) -> int:
        """Tokens of the client's prompt with its passages; 0 if not known yet."""
        first = self.usage if self.usage is not None and self.requests == 1 else {}
        return self._prompt_tokens or len(self.transcript.prompt_ids or ()) or int(first.get("prompt_tokens", 0))

    def _completion_count(self) -> int:
        """Tokens so far: of all choices if the server reports usage with every chunk, else of the first."""
        now = self.usage if self.usage is not None and self.requests == 1 else {}
        return int(now.get("completion_tokens", 0)) or self.sent_tokens

    def _take_probes(self) -> tuple[Probe, ...]:
        probes, self.probes = self.probes, []
        return tuple(probes)


def _count(value: Any) -> int:
    """Parse a number of tokens. Raises ValueError or TypeError."""
    count = int(value)
    if not 0 <= count <= _MAX_INT:
        raise ValueError(f"{count} is not a number of tokens")
    return count


def _cached_tokens(usage: Json) -> int:
    """Return how many of the prompt's tokens were cached, 0 if the server does not tell."""
    details = usage.get("prompt_tokens_details")
    count = details.get("cached_tokens") if isinstance(details, dict) else 0
    return count if type(count) is int and 0 <= count <= _MAX_INT else 0


def _ids(value: Any) -> list[int]:
    """Parse a list of token ids; empty if missing. Raises TypeError."""
    ids = value or []
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one <= _MAX_INT for one in ids):
        raise TypeError("its token_ids are not a list of token ids")
    return ids


def _set_text(choice: Json, text: str) -> None:
    if "delta" in choice:
        choice["delta"] = choice["delta"] | {"content": text}
    else:
        choice["text"] = text
