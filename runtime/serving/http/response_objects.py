"""OpenAI's response object, complete or as events, from the pieces of an answer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from runtime.errors import TrinityError
from runtime.retrieval.stores.records import new_id
from runtime.serving.frontend.requests import Relayed
from runtime.serving.http.citations import Citations
from runtime.serving.http.responses import Json, to_json
from runtime.serving.messages import Tokens

MESSAGE, TEXT = "message", "output_text"
_CALL = "response.file_search_call"


@dataclass(slots=True)
class ResponseBuilder:
    """Builder of one response. `base`: the fields that do not change. query: of the file search, None without one.

    Results of the search come first, with their texts for citations, then the answer's tokens; `events` returns what
    has happened since the last call. include_results: whether clients see the results. ranking: fields of the search
    that say whether its results were reranked.
    """

    id: str
    base: Json
    query: str | None = None
    include_results: bool = False
    results: list[Json] = field(default_factory=list)
    ranking: Json = field(default_factory=dict)
    text: str = ""
    annotations: list[Json] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    last: Tokens | None = None
    _citations: Citations = field(default_factory=Citations)
    _search_id: str = field(default_factory=lambda: new_id("fs_"))
    _message_id: str = field(default_factory=lambda: new_id("msg_"))
    _sequence: int = 0

    def add_result(self, result: Json) -> None:
        """Add a passage that the answer may cite: OpenAI's result, with the text that the model was given."""
        self.results.append(result)
        self._citations.add_passage(result["text"])

    def add(self, piece: Tokens) -> list[Json]:
        """Add a piece of the answer; return the new annotations."""
        before = len(self.annotations)
        self.text += piece.text
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens or len(piece.prompt_token_ids)
        self.completion_tokens += len(piece.token_ids)
        if isinstance(piece, Relayed):
            self.completion_tokens = piece.completion_tokens
        citations = list(self._citations.add(piece.text))
        if piece.finish_reason is not None:
            self.last = piece
            citations += self._citations.finish()
        for citation in citations:
            cited = self.results[citation.passage]
            self.annotations.append({
                "type": "file_citation",
                "file_id": cited["file_id"],
                "filename": cited["filename"],
                "index": citation.position,
            })  # fmt: skip
        return self.annotations[before:]

    # ---- objects

    @property
    def status(self) -> str:
        if self.last is None:
            return "in_progress"
        return "incomplete" if self.last.finish_reason == "length" else "completed"

    def body(self, error: TrinityError | None = None) -> Json:
        """Return the response as it is now."""
        status = "failed" if error is not None else self.status
        ended = status in ("completed", "incomplete")
        return self.base | {
            "id": self.id,
            "object": "response",
            "status": status,
            "error": None if error is None else {"code": _error_code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [*self._search_items("completed"), self._message(status)] if ended else [],
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> Json:
        assert self.last is not None, "it has ended"
        prompt, completion, reasoning = self.prompt_tokens, self.completion_tokens, 0
        if isinstance(self.last, Relayed) and self.last.usage is not None:
            prompt = self.last.usage.get("prompt_tokens", prompt)
            completion = self.last.usage.get("completion_tokens", completion)
            if isinstance(details := self.last.usage.get("completion_tokens_details"), dict):
                told = details.get("reasoning_tokens")
                reasoning = min(max(told, 0), completion) if isinstance(told, int) else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.last.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + completion,
        }

    def _search_items(self, status: str) -> list[Json]:
        if self.query is None:
            return []
        shown = self.results if self.include_results and status == "completed" else None
        item = {"id": self._search_id, "type": "file_search_call", "status": status, "queries": [self.query]}
        return [item | {"results": shown} | (self.ranking if status == "completed" else {})]

    def _message(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self._message_id, "type": MESSAGE, "role": "assistant", "status": status, "content": content}

    def _part(self) -> Json:
        return {"type": TEXT, "text": self.text, "annotations": self.annotations, "logprobs": []}

    # ---- events

    def opening(self) -> bytes:
        """Return the events up to the search, or to the answer without one."""
        created = {"response": self.body()}
        events: list[tuple[str, Json]] = [("response.created", created), ("response.in_progress", created)]
        for item in self._search_items("in_progress"):
            events += [("response.output_item.added", {"output_index": 0, "item": item})]
            events += [(f"{_CALL}.{stage}", self._search_at) for stage in ("in_progress", "searching")]
        return self._encode(events)

    def searched(self) -> bytes:
        """Return the events behind the search; the results are known."""
        (item,) = self._search_items("completed")
        done: Json = {"output_index": 0, "item": item}
        return self._encode([(f"{_CALL}.completed", self._search_at), ("response.output_item.done", done)])

    def message(self) -> bytes:
        """Return the events before the first token."""
        item, part = self._message("in_progress"), {"type": TEXT, "text": "", "annotations": [], "logprobs": []}
        return self._encode([
            ("response.output_item.added", {"output_index": self._output_index, "item": item}),
            ("response.content_part.added", self._at | {"part": part}),
        ])  # fmt: skip

    def delta(self, piece: Tokens) -> bytes:
        """Add a piece of the answer, and return its events."""
        count = len(self.annotations)
        events: list[tuple[str, Json]] = []
        added = self.add(piece)
        if piece.text:
            events += [("response.output_text.delta", self._at | {"delta": piece.text, "logprobs": []})]
        for number, annotation in enumerate(added, count):
            cited = self._at | {"annotation_index": number, "annotation": annotation}
            events += [("response.output_text.annotation.added", cited)]
        return self._encode(events)

    def closing(self) -> bytes:
        """Return the events behind the last token."""
        item = self._message(self.status)
        return self._encode([
            ("response.output_text.done", self._at | {"text": self.text, "logprobs": []}),
            ("response.content_part.done", self._at | {"part": self._part()}),
            ("response.output_item.done", {"output_index": self._output_index, "item": item}),
            (f"response.{self.status}", {"response": self.body()}),
        ])  # fmt: skip

    def failure(self, error: TrinityError) -> bytes:
        """Return the event that ends a response after an error."""
        return self._encode([("response.failed", {"response": self.body(error)})])

    @property
    def _output_index(self) -> int:
        return 0 if self.query is None else 1

    @property
    def _search_at(self) -> Json:
        return {"item_id": self._search_id, "output_index": 0}

    @property
    def _at(self) -> Json:
        return {"item_id": self._message_id, "output_index": self._output_index, "content_index": 0}

    def _encode(self, events: Iterable[tuple[str, Json]]) -> bytes:
        return b"".join(self._encoded(events))

    def _encoded(self, events: Iterable[tuple[str, Json]]) -> Iterator[bytes]:
        for name, fields in events:
            content = to_json({"type": name, "sequence_number": self._sequence} | fields)
            self._sequence += 1
            yield b"event: " + name.encode() + b"\ndata: " + content + b"\n\n"


def _error_code(error: TrinityError) -> str:
    """Return OpenAI's code of an error: it knows few."""
    return "server_error" if error.status >= 500 else "invalid_prompt"
