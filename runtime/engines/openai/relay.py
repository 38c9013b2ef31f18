"""From a server's chunks to the pieces of an answer, over all the requests in which it is written."""

from collections.abc import Callable
from typing import Any

from runtime.engines.openai.sequel import Script
from runtime.errors import EngineFailed, InvalidRequest
from runtime.serving import stages
from runtime.serving.frontend.requests import Relayed
from runtime.serving.messages import Probe
from runtime.serving.model.text import StopStrings

Json = dict[str, Any]

_HALF = "\ufffd"  # what servers make of a character whose bytes are not all there
_SILENT = ("role", "content")
_MOST = 2**31 - 1  # of a token's id, and of tokens
_COUNTS = ("prompt_tokens", "completion_tokens")


class Relay:
    """Takes chunks, tells pieces. `tell` gets each; `clock` gives monotonic ns.

    `chat`: the client asked for a chat; `stops`: stop strings that are looked for here, because an answer in several
    requests may have one across two of them. With `whole_characters` tokens that end within a character are told with
    those that complete it, so that no request goes on from half a character.
    """

    def __init__(
        self,
        request_id: str,
        tell: Callable[[Relayed], object],
        clock: Callable[[], int],
        *,
        chat: bool,
        sent: Json,
        stops: tuple[str, ...] = (),
    ) -> None:
        self._id, self._tell, self._clock = request_id, tell, clock
        self._chat = chat
        self._wants_ids = bool(sent.get("return_token_ids"))
        self._wants_logprobs = sent.get("logprobs") not in (None, False)
        self._choices = int(sent.get("n", 1))
        self._stops = StopStrings(stops)
        self.whole_characters = False
        self.script = Script()
        self.stamps: dict[str, int] = {}
        self.probes: list[Probe] = []  # ended, to be told with the next piece
        self.stalled_ns = 0
        self.told = 0  # tokens of the first choice, as far as the server tells them, else its pieces
        self._prompt_tokens = 0
        self.told_before = 0  # when the request that runs began
        self._last: tuple[str, list[int]] = ("", [])
        self.usage: Json | None = None  # of the request that runs
        self.requests = 0
        self._held: list[tuple[Json, str, list[int]]] = []
        self._finished: dict[int, Json] = {}
        self._budget: int | None = None
        self._made: dict[int, int] = {}
        self._cut: set[int] = set()
        self.ended = False

    # ---- one request

    def begin(self, budget: int | None = None) -> None:
        """Another request's chunks come now. What was held back is not told: the request goes on from before it.

        budget: tokens of each choice; one that goes on behind them is cut there. Where a server tells no token ids,
        each piece of text counts as one.
        """
        self._budget = budget
        self._made.clear()
        self._cut.clear()
        if self.requests == 1 and self.usage:
            self._prompt_tokens = int(self.usage.get("prompt_tokens", 0))
        self._held.clear()
        self._finished.clear()
        self.told_before = self.told
        self.usage = None
        self.requests += 1

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice, once it is there."""
        choice = self._finished.get(0)
        return None if choice is None else str(choice["finish_reason"])

    @property
    def cut(self) -> bool:
        """Whether all choices have ended, some of them here and not at the server."""
        return bool(self._cut) and len(self._finished) == self._choices

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.stopped

    def take(self, chunk: Json) -> None:
        """A chunk. Raises InvalidRequest if it lacks what the request asked for, EngineFailed if it makes no sense."""
        try:
            self._take(chunk)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"the engine's stream has a chunk that makes no sense: {error}") from error

    def _take(self, chunk: Json) -> None:
        if usage := chunk.get("usage"):
            self.usage = usage | {name: _count(usage[name]) for name in _COUNTS}
        if self.script.prompt_ids is None and (ids := _ids(chunk.get("prompt_token_ids"))):
            self.script.prompt_ids = ids
        loud = []
        for choice in chunk.get("choices") or ():
            if self.script.prompt_ids is None and (ids := _ids(choice.get("prompt_token_ids"))):
                self.script.prompt_ids = ids
            if (fit := self._fitted(choice)) is not None:
                loud.append(fit)
        if loud:
            self._pass_on(loud)

    def _fitted(self, choice: Json) -> tuple[Json, str, list[int]] | None:
        """The choice as the client's endpoint has it, its text and its tokens; None if there is nothing to tell yet."""
        choice.pop("prompt_token_ids", None)
        ids = _ids(choice.get("token_ids"))
        if not self._wants_ids:
            choice.pop("token_ids", None)
        if self._chat and "text" in choice:  # a chat that goes on as a completion
            choice["delta"] = {"content": choice.pop("text")}
        index = choice.setdefault("index", 0)
        if not isinstance(index, int) or not 0 <= index < self._choices:
            raise ValueError(f"a choice has the index {index!r}, {self._choices} were asked for")
        delta = choice.get("delta")
        if self._chat and delta is None:
            delta = choice["delta"] = {}
        text = (choice.get("text") if delta is None else delta.get("content")) or ""
        if not isinstance(text, str):
            raise TypeError(f"its text is {type(text).__name__}")
        if self._over_budget(index, len(ids) or int(bool(text or _thought(delta)))):
            if index in self._cut:
                return None
            self._cut.add(index)
            choice, text, ids = {"index": index, "logprobs": None, "finish_reason": "length"}, "", []
            choice["delta" if self._chat else "text"] = delta = {} if self._chat else ""
        loud = bool(text or ids) or (delta is not None and any(delta[name] for name in delta if name not in _SILENT))
        if loud and self._wants_logprobs and choice.get("logprobs") is None and text:
            raise InvalidRequest("logprobs: the engine does not tell any; leave it out", "logprobs")
        if (reason := choice.get("finish_reason")) is not None:
            if not isinstance(reason, str):
                raise TypeError(f"its finish_reason is {type(reason).__name__}")
            self._finished[index] = choice
            if index == 0:  # told at the end: the usage comes after it
                self._last = (text, ids)
                return None
        elif not loud and index == 0:
            return None  # who speaks: the answer's opening says it
        return (choice, text, ids) if index == 0 else (choice, "", [])

    def _over_budget(self, index: int, tokens: int) -> bool:
        """Whether a choice has more than it was asked for, with this many more."""
        self._made[index] = self._made.get(index, 0) + tokens
        return self._budget is not None and self._made[index] > self._budget

    def _pass_on(self, loud: list[tuple[Json, str, list[int]]]) -> None:
        if self.whole_characters:
            self._held += loud
            if not any(self._is_whole(choice, text) for choice, text, _ in loud):
                return
            loud, self._held = self._held, []
        self._say(loud)

    def _is_whole(self, choice: Json, text: str) -> bool:
        if text:
            return not text.endswith(_HALF)
        delta = choice.get("delta") or {}
        return any(delta[name] for name in delta if name not in _SILENT)

    # ---- what is told

    def _say(self, parts: list[tuple[Json, str, list[int]]]) -> None:
        text, written, ids, choices = "", "", list[int](), list[Json]()
        for choice, piece, tokens in parts:
            told = self._stops.push(piece)
            if told != piece:
                _set_text(choice, told)
            text += told
            written += piece
            ids += tokens
            choices.append(choice)
            self.told += len(tokens) or int(bool(piece))
            if self._stops.stopped:
                break
        self.script.add(written, ids)  # with what may become a stop string: the model has written it
        now = self._clock()
        first = stages.FIRST_TOKEN not in self.stamps
        if first:
            self.stamps[stages.PREFILL_END] = self.stamps[stages.FIRST_TOKEN] = now
        self._tell(
            Relayed(
                self._id,
                text,
                tuple(ids),
                prompt_tokens=self._prompt_count(),
                completion_tokens=self._completion_count(),
                stages=dict(self.stamps) if first else {},
                prompt_token_ids=tuple(self.script.prompt_ids or ()) if first else (),
                probes=self._take_probes(),
                choices=tuple(choices),
            )
        )

    def pause(self, made: int) -> None:
        """The request has ended after `made` tokens, and the answer goes on in another: tell what of it is whole."""
        choice = self._finished.pop(0)
        choice["finish_reason"] = None
        text, ids = self._last
        if text or ids:
            self._pass_on([(choice, text, ids)])
        if self.told == self.told_before:
            self.flush()  # half a character it is then: the answer must get on
        if not self.whole_characters:
            self.told = self.told_before + made  # a server that tells no tokens may have several in a piece

    def flush(self) -> None:
        """Tell what was held back."""
        parts, self._held = self._held, []
        if parts:
            self._say(parts)

    def end(self, finish_reason: str | None = None) -> None:
        """The answer has ended, by the server's finish reasons or by this one. Raises InvalidRequest for choices that
        were asked for and did not come."""
        if finish_reason is None:
            if len(self._finished) < self._choices or 0 not in self._finished:
                made = len(self._finished)
                raise InvalidRequest(f"n = {self._choices}: the engine wrote {made} of these choices; leave n out", "n")
            last = self._finished[0]
            self.flush()
            text, ids = self._last
        else:
            last, text, ids = Json(index=0, logprobs=None, finish_reason=finish_reason), "", []
            last["delta" if self._chat else "text"] = {} if self._chat else ""
        told = self._stops.push(text)
        if self._stops.stopped:
            last["finish_reason"] = "stop"
        else:
            told += self._stops.flush()
        if told != text:
            _set_text(last, told)
        self.told += len(ids) or int(bool(text))
        self.script.add(told, ids)
        now = self.stamps[stages.END] = self._clock()
        if stages.FIRST_TOKEN not in self.stamps:  # an answer without a token
            self.stamps[stages.PREFILL_END] = self.stamps[stages.FIRST_TOKEN] = now
        reasons = {choice["finish_reason"] for choice in (*self._finished.values(), last)}
        usage = self._whole_usage()
        self.ended = True
        self._tell(
            Relayed(
                self._id,
                told,
                tuple(ids),
                "length" if "length" in reasons else "stop",
                int(usage.get("prompt_tokens", 0)) if usage else 0,
                self.stamps,
                tuple(self.script.prompt_ids or ()) if not self.told else (),
                self.stalled_ns,
                self._take_probes(),
                choices=(last,),
                usage=usage,
                completion_tokens=int(usage.get("completion_tokens", self.told)) if usage else self.told,
            )
        )

    def _whole_usage(self) -> Json | None:
        """The server's, or over several requests: the prompt's tokens of the first, and all that was told."""
        if self.usage is not None and self.requests == 1:
            return self.usage
        prompt = self._prompt_count()
        if not prompt:
            return None
        return {"prompt_tokens": prompt, "completion_tokens": self.told, "total_tokens": prompt + self.told}

    def _prompt_count(self) -> int:
        """Tokens of the client's prompt and its passages; 0: not known yet."""
        first = self.usage if self.usage is not None and self.requests == 1 else {}
        return self._prompt_tokens or len(self.script.prompt_ids or ()) or int(first.get("prompt_tokens", 0))

    def _completion_count(self) -> int:
        """Tokens so far: of all choices if the server tells with every chunk, else of the first."""
        now = self.usage if self.usage is not None and self.requests == 1 else {}
        return int(now.get("completion_tokens", 0)) or self.told

    def _take_probes(self) -> tuple[Probe, ...]:
        probes, self.probes = self.probes, []
        return tuple(probes)


def _count(value: Any) -> int:
    """A number of tokens. Raises ValueError or TypeError for what is none."""
    count = int(value)
    if not 0 <= count <= _MOST:
        raise ValueError(f"{count} is no number of tokens")
    return count


def _ids(value: Any) -> list[int]:
    """Token ids, none where there are none. Raises TypeError for what are none."""
    found = value or []
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one <= _MOST for one in found):
        raise TypeError("its token ids are not a list of them")
    return found


def _thought(delta: Json | None) -> object:
    return delta is not None and (delta.get("reasoning_content") or delta.get("reasoning"))


def _set_text(choice: Json, text: str) -> None:
    if "delta" in choice:
        choice["delta"] = choice["delta"] | {"content": text}
    else:
        choice["text"] = text
