"""An in-process OpenAI server that replaces the network; each token of its model is a function of all tokens before.

Tokens are bytes, and the next one is a digest of the whole sequence: so an answer that goes on in another request is
right exactly if that request had the right sequence. `Behaviour` selects the kind of server and its faults.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from runtime.engines.openai.http import Disconnected, Http, Response

Json = dict[str, Any]

URL = "http://fake/v1"
MODEL = "fake-model"
END = 0  # the token that ends an answer
# A decode instance's metrics, as vLLM 0.32 with NixlConnector and two ranks exports them (without its other ones).
_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="fake"} RUNNING
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="fake"} WAITING
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="fake"} USAGE
# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="fake"} 3.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="fake"} 4.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="fake"} 4.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="fake"} LINK_S
# HELP vllm:nixl_num_failed_transfers_total Number of failed NIXL KV Cache transfers.
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="fake"} 0.0
"""


@dataclass
class Behaviour:
    """`kv_role`: accepts the `kv_transfer_params` that vLLM's connectors accept in that role, and refuses others;
    `token_ids`: returns and accepts them, and tokenizes (vLLM); `goes_on`: continues a chat's last turn (SGLang);
    `renders`: renders a chat as text (llama.cpp); `strict`: refuses fields that OpenAI does not have.

    `refuses`: status and body of every POST; `breaks_after`: each stream's connection is lost after so many chunks;
    `hangs_after`: or it stops responding; `down`: nothing listens; `leaves`: it accepts nothing
    new; `ends`: the model ends its answer after so many tokens.
    """

    token_ids: bool = True
    goes_on: bool = False
    renders: bool = False
    strict: bool = False
    usage: bool = True
    cached_tokens: int | None = None
    choices: bool = True
    logprobs: bool = True
    completions: bool = True
    finish: bool = True
    tokens_per_chunk: int = 1
    context: int = 4096
    key: str = ""
    model: str = MODEL
    ends: int | None = None
    refuses: tuple[int, Json] | None = None
    breaks_after: int | None = None
    hangs_after: int | None = None
    down: bool = False
    letters: str = "abcdefghijklmnopqrstuvwxyz "
    kv_role: str = ""
    metrics: str | None = None
    leaves: bool = False


@dataclass
class FakeServer(Http):
    """`asked` are the bodies of all POSTs by path, `open` the streams that are being read, `computed` and `pulled` how
    many prompts it has handed over and taken over."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    asked: list[tuple[str, Json]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    computed: int = 0
    pulled: int = 0
    closed: bool = False
    says: list[Json] = field(default_factory=list)  # the chunks of every answer, instead of the model's
    whole: Any = None  # the body of an answer that is not streamed, instead

    def generations(self) -> list[Json]:
        """Return the bodies of all generation requests."""
        return [body for path, body in self.asked if path.endswith("/completions")]

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        how, path = self.behaviour, urlsplit(url).path
        if how.down:
            raise Disconnected("connection refused")
        if how.key and headers.get("authorization") != f"Bearer {how.key}":
            return _json(401, _error("wrong key"))
        if method == "GET":
            if path == "/metrics" and how.metrics is not None:
                return WholeResponse(200, how.metrics.encode())
            if path != "/v1/models":
                return _json(404, {"detail": "Not Found"})
            return _json(200, {"object": "list", "data": [{"id": how.model, "max_model_len": how.context}]})
        asked = json.loads(body or b"null")
        self.asked.append((path, asked))
        self.headers.append(dict(headers))
        if how.refuses is not None:
            return _json(*how.refuses)
        return self._post(path, asked)

    @property
    def accepting(self) -> bool:
        return not self.behaviour.leaves

    async def close(self) -> None:
        self.closed = True

    def _post(self, path: str, body: Json) -> Response:
        how = self.behaviour
        if path == "/tokenize" and how.token_ids:
            return _json(200, {"tokens": list(body["prompt"].encode()), "max_model_len": how.context})
        if path == "/apply-template" and how.renders:
            return _json(200, {"prompt": rendered(body["messages"])})
        if path == "/v1/chat/completions" or (path == "/v1/completions" and how.completions):
            return self._generate(body, chat="messages" in body)
        return _json(404, {"detail": "Not Found"})

    def _generate(self, body: Json, chat: bool) -> Response:
        how = self.behaviour
        if how.strict and (extra := {"return_token_ids", "continue_final_message"} & set(body)):
            return _json(400, _error(f"unknown field {sorted(extra)[0]}"))
        if body["model"] != how.model:
            return _json(404, _error(f"The model `{body['model']}` does not exist", code="model_not_found"))
        prompt = self._prompt(body, chat)
        if not isinstance(prompt, list):
            return prompt
        limit: int = body.get("max_completion_tokens") or body.get("max_tokens", 16)
        if len(prompt) + limit > how.context:
            return _json(400, _error(f"maximum context length is {how.context} tokens", "context_length_exceeded"))
        count = body.get("n", 1) if how.choices else 1
        answers = [self._answer(prompt, limit, index, body.get("stop") or []) for index in range(count)]
        ids = bool(body.get("return_token_ids")) and how.token_ids
        if wrong := self._wrong_transfer(body, prompt):
            return _json(400, _error(f"kv_transfer_params: {wrong}"))
        if not body.get("stream") and self.whole is not None:
            return _json(200, self.whole)
        if not body.get("stream"):
            usage: Json = {"prompt_tokens": len(prompt), "completion_tokens": sum(len(tokens) for tokens, _ in answers)}
            return _json(200, {"choices": [], "usage": usage} | self._transfer(body, prompt))
        chunks = self.says or self._chunks(prompt, answers, body, chat, ids)
        return _Stream(self, chunks)

    def _wrong_transfer(self, body: Json, prompt: list[int]) -> str:
        """Return what vLLM's connectors would reject in the body."""
        params, role = body.get("kv_transfer_params"), self.behaviour.kv_role
        if params is None:
            return ""
        if params.get("do_remote_decode"):
            if role != "kv_producer":
                return f"do_remote_decode at {role or 'an instance without a connector'}"
            if body.get("stream") or body.get("max_tokens") != 1 or {"stream_options", "min_tokens"} & set(body):
                return "prefill is asked for one token, whole, without min_tokens"
            return ""
        if role != "kv_consumer":
            return f"do_remote_prefill at {role or 'an instance without a connector'}"
        if not params.get("do_remote_prefill") or params.get("remote_request_id", "") == "":
            return "neither do_remote_prefill nor what prefill said"
        if params.get("remote_block_ids") != [_digest(prompt)]:
            return "the blocks of another prompt"
        self.pulled += 1
        return ""

    def _transfer(self, body: Json, prompt: list[int]) -> Json:
        if not (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return {}
        self.computed += 1
        return {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "fake",
                "remote_block_ids": [_digest(prompt)],
                "remote_request_id": f"x-{self.computed}",
                "remote_host": "localhost",
                "remote_port": 1,
                "tp_size": 1,
            }
        }

    def _prompt(self, body: Json, chat: bool) -> list[int] | Response:
        if not chat:
            prompt = body["prompt"]
            if isinstance(prompt, list):
                return prompt if self.behaviour.token_ids else _json(400, _error("prompt must be a string"))
            return list(prompt.encode())
        goes_on = self.behaviour.goes_on and body.get("continue_final_message")
        return list(rendered(body["messages"], goes_on=bool(goes_on)).encode())

    def _answer(self, prompt: list[int], limit: int, choice: int, stops: list[str]) -> tuple[list[int], str]:
        tokens: list[int] = []
        while len(tokens) < limit:
            if self.behaviour.ends is not None and self._made(prompt) + len(tokens) >= self.behaviour.ends:
                return tokens, "stop"
            tokens.append(next_token([*prompt, *tokens], choice, self.behaviour.letters))
            if any(stop in bytes(tokens).decode(errors="replace") for stop in stops):
                return tokens, "stop"
        return tokens, "length"

    def _made(self, prompt: list[int]) -> int:
        """Return the number of answer tokens that the prompt already ends with."""
        return len(prompt) - (bytes(prompt).rfind(b"<a>") + 3) if b"<a>" in bytes(prompt) else 0

    def _chunks(
        self, prompt: list[int], answers: list[tuple[list[int], str]], body: Json, chat: bool, ids: bool
    ) -> list[Json]:
        chunks: list[Json] = []

        def send(index: int, text: str, tokens: list[int], finish: str | None, first: bool = False) -> None:
            choice: Json = {"index": index, "finish_reason": finish if self.behaviour.finish else None}
            choice |= {"delta": {"role": "assistant", "content": ""} if first else {"content": text}} if chat else {}
            choice |= {} if chat else {"text": text}
            if body.get("logprobs") and self.behaviour.logprobs and text:
                choice["logprobs"] = {"content": [{"token": text, "logprob": -0.5}]}
            if ids and not first:
                choice["token_ids"] = tokens
            chunk: Json = {"id": "x", "object": "chunk", "model": body["model"], "choices": [choice]}
            if ids and not chunks:
                chunk["prompt_token_ids"] = prompt
            chunks.append(chunk)

        size = self.behaviour.tokens_per_chunk
        for index, (tokens, finish) in enumerate(answers):
            if chat:
                send(index, "", [], None, first=True)
            told = ""
            for begin in range(0, len(tokens), size):
                text = bytes(tokens[: begin + size]).decode(errors="replace")
                end = begin + size >= len(tokens)
                whole = text if end else text.rstrip("\ufffd")  # an incomplete character waits for its remaining bytes
                send(index, whole[len(told) :], tokens[begin : begin + size], finish if end else None)
                told = whole
            if not tokens:
                send(index, "", [], finish)
        if self.behaviour.usage and (body.get("stream_options") or {}).get("include_usage"):
            made = sum(len(tokens) for tokens, _ in answers)
            usage: Json = {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}
            if self.behaviour.cached_tokens is not None:
                usage |= {"prompt_tokens_details": {"cached_tokens": self.behaviour.cached_tokens}}
            chunks.append({"choices": [], "usage": usage})
        return chunks


class _Stream(Response):
    def __init__(self, server: FakeServer, chunks: list[Json]) -> None:
        self._server, self._chunks, self.status = server, chunks, 200
        self._server.open += 1
        self._closed = False

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        for count, chunk in enumerate(self._chunks):
            if count == self._server.behaviour.breaks_after:
                raise Disconnected("connection reset")
            if count == self._server.behaviour.hangs_after:
                await asyncio.Event().wait()
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"

    def complete(self) -> None:
        """Do nothing: there is no connection to keep."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server.open -= 1


@dataclass
class WholeResponse(Response):
    status: int
    body: bytes

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        yield self.body

    def complete(self) -> None:
        """Do nothing: there is no connection to keep."""

    def close(self) -> None:
        """Do nothing: the answer is complete."""


def rendered(messages: list[Json], goes_on: bool = False) -> str:
    """Apply the fake model's chat template."""
    turns = [f"<{turn['role'][0]}>{text_of(turn['content'])}" for turn in messages]
    return "</>".join(turns if goes_on else [*turns, "<a>"])


def metrics(running: int = 0, waiting: int = 0, kv: float = 0.0, link_s: float = 0.0) -> str:
    """Return vLLM's metrics for this load."""
    values = {"RUNNING": f"{running}.0", "WAITING": f"{waiting}.0", "USAGE": str(kv), "LINK_S": str(link_s)}
    return re.sub("|".join(values), lambda name: values[name[0]], _METRICS)


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def next_token(tokens: list[int], choice: int = 0, letters: str = "abcdefghijklmnopqrstuvwxyz ") -> int:
    """Return the fake model's next token after a sequence."""
    digest = hashlib.blake2b(bytes(tokens) + bytes([choice]), digest_size=2).digest()
    alphabet = letters.encode()
    return alphabet[int.from_bytes(digest, "little") % len(alphabet)]


def completion(prompt: list[int], count: int) -> list[int]:
    """Return the fake model's next `count` tokens after a sequence."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


def _digest(tokens: list[int]) -> str:
    return hashlib.blake2b(bytes(tokens)).hexdigest()


def _json(status: int, value: Json) -> Response:
    return WholeResponse(status, json.dumps(value).encode())


def _error(message: str, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
