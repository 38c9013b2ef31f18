"""POST /tokenize: the token ids of a text or a chat, in vLLM's format.

Another node in front of this one (`runtime.engines`) needs them to continue an answer in another request.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest, Unavailable
from runtime.serving.http.api import Api
from runtime.serving.http.api_types import ChatMessage, chat_message
from runtime.serving.http.parsing import StrictModel, check_bytes, parse_object, validate
from runtime.serving.http.responses import json_response
from runtime.serving.messages import Message

if TYPE_CHECKING:
    from runtime.serving.model.tokenizer import Tokenizer


class TokenizeBody(StrictModel):
    """`prompt` or `messages`. With `add_special_tokens` false, a prompt gets no special tokens at its ends, and special
    tokens written in it are not parsed."""

    prompt: str | None = None
    messages: list[Annotated[ChatMessage, BeforeValidator(chat_message)]] | None = Field(None, min_length=1)
    add_special_tokens: bool = True

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse JSON and ignore unknown fields. Raises InvalidRequest."""
        fields = parse_object(body)
        read = validate(cls, {name: value for name, value in fields.items() if name in cls.model_fields})
        if (read.prompt is None) == (read.messages is None):
            raise InvalidRequest("set either prompt or messages", "prompt")
        return read

    @property
    def param(self) -> str:
        """The name of the parameter that is set."""
        return "prompt" if self.messages is None else "messages"


class Tokens:
    """A model's tokenizer in a thread of its own, loaded on first use."""

    def __init__(self, load: "Callable[[], Tokenizer]") -> None:
        self._load = load
        self._tokenizer: Tokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def of(self, body: TokenizeBody) -> list[int]:
        """Return token ids. Raises InvalidRequest without a chat template, or if it refuses the messages."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._of, body)

    def _of(self, body: TokenizeBody) -> list[int]:
        tokenizer = self._tokenizer = self._tokenizer or self._load()
        if body.messages is not None:
            return tokenizer.chat([Message(turn.role, turn.content) for turn in body.messages])
        text = body.prompt or ""
        return tokenizer.prompt(text) if body.add_special_tokens else tokenizer.encode(text)


async def tokenize(api: Api, http: Request) -> Response:
    body = TokenizeBody.parse(await api.read(http))
    texts = [body.prompt or ""] if body.messages is None else [turn.content for turn in body.messages]
    check_bytes(sum(len(text.encode()) for text in texts), api.settings.max_prompt_bytes, body.param)
    if api.service.tokens is None:
        raise Unavailable("this node runs no model itself and has no tokenizer")
    tokens = await api.service.tokens.of(body)
    content = {"count": len(tokens), "max_model_len": api.settings.context_tokens, "tokens": tokens}
    return json_response(content)
