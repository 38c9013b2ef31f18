"""Detection of a server's capabilities, by a handful of requests of one token each."""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

from runtime.engines.openai.server import Server
from runtime.engines.openai.transfer import servers_of
from runtime.errors import ConfigError, EngineFailed, EngineRefusedKey, EngineUnreachable, InvalidRequest, TrinityError
from runtime.node.api_keys import read_engine_key
from runtime.node.engine_config import OpenAiSection, ServedSection

log = logging.getLogger(__name__)

Json = dict[str, Any]
Continuation = Literal["tokens", "chat", "text", ""]
"""How an answer continues in another request: from token ids, from a chat's last turn, from text; "": not at all."""

_TIMEOUT_S = 60.0  # of the whole detection
_TURNS = [{"role": "user", "content": "Count to nine."}, {"role": "assistant", "content": "One two three"}]
CONTINUE_LAST_TURN = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields with which a server continues a chat's last turn, the assistant's, instead of starting a new one."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a server.

    `context_tokens`: 0 if the server does not report it; `usage`: reports token counts in streams (`stream_options`);
    `token_ids`: returns token ids (`return_token_ids`); `token_prompts`: accepts token ids as a completion's prompt;
    `tokenizes`: has `/tokenize`; `continues_chats`: continues a chat's last turn; `renders_chats`: has
    `/apply-template`, which renders a chat as text.
    """

    chat: bool = True
    completions: bool = True
    context_tokens: int = 0
    usage: bool = True
    token_ids: bool = False
    token_prompts: bool = False
    tokenizes: bool = False
    continues_chats: bool = False
    renders_chats: bool = False

    @property
    def continues_by_tokens(self) -> bool:
        """Whether an answer can continue in another request from its exact tokens."""
        return self.token_ids and self.token_prompts and self.tokenizes and self.completions

    @property
    def chat_continuation(self) -> Continuation:
        """How a chat's answer continues in another request; "" if it cannot."""
        if self.continues_by_tokens:
            return "tokens"
        if self.continues_chats:
            return "chat"
        return "text" if self.renders_chats and self.completions else ""

    def limitations(self) -> list[str]:
        """Return the features that this server rules out, one sentence each."""
        missing = []
        if not self.chat:
            missing.append("no chats: /chat/completions is refused")
        if not self.completions:
            missing.append("no completions: /completions is refused")
        if self.chat and not self.chat_continuation:
            missing.append(
                "no probes in chats, and no retry elsewhere once a chat's answer has begun: it neither returns token"
                " ids and tokenizes, nor continues a chat's last turn, nor renders a chat"
            )
        if not self.usage:
            missing.append("no usage: it ignores stream_options, so stream_options.include_usage is refused")
        if not self.token_ids:
            missing.append("no token ids: return_token_ids is refused")
        return missing

    def __str__(self) -> str:
        context = f"context {self.context_tokens}" if self.context_tokens else "context unknown"
        methods = {
            "tokens": "by token ids, exact",
            "chat": "by continue_final_message",
            "text": "by rendered text",
            "": "none",
        }
        return f"{context}; probes in chats: {methods[self.chat_continuation]}"


async def detect_capabilities(server: Server, section: ServedSection) -> Capabilities:
    """Return the capabilities of a server.

    Raises EngineUnreachable, Overloaded or EngineFailed for a fault that may pass, and ConfigError for one that does
    not: the server refuses the key, does not have the model, or its context is too short.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await _detect(server, section)
    except TimeoutError:
        raise EngineUnreachable(f"{server.url} does not answer within {_TIMEOUT_S:.0f} s") from None
    except EngineRefusedKey as error:
        raise ConfigError(f"model.api_key_file: {error.message}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a field has the wrong type
        raise EngineFailed(f"{server.url}: malformed response: {str(error)[:200]}") from error


async def _detect(server: Server, section: ServedSection) -> Capabilities:
    context = await _read_context(server, section)
    capabilities = await _try_endpoints(server, section.name, context)
    if not capabilities.continues_by_tokens and capabilities.chat:
        continues_chats = await _continues_chats(server, section.name)
        capabilities = replace(
            capabilities, continues_chats=continues_chats, renders_chats=await _renders_chats(server)
        )
    return capabilities


async def _read_context(server: Server, section: ServedSection) -> int:
    """Return the context of the model in tokens, 0 if the server does not report it."""
    try:
        listed = (await server.get("/models")).get("data")
    except InvalidRequest as error:
        raise ConfigError(
            f"model.url = {server.url!r}: no /models there ({error.message}): set it to the address up to its /v1"
        ) from error
    models = (
        {str(model.get("id")): model for model in listed if isinstance(model, dict)} if isinstance(listed, list) else {}
    )
    if section.name not in models:
        available = ", ".join(repr(name) for name in list(models)[:10]) or "none"
        raise ConfigError(f"model.name = {section.name!r}: {server.url} has no such model; it has: {available}")
    reported = models[section.name]
    meta = reported.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    sizes = (reported.get("max_model_len"), reported.get("context_length"), meta.get("n_ctx"), meta.get("n_ctx_train"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), 0)


async def _try_endpoints(server: Server, model: str, context: int) -> Capabilities:
    base = {"model": model, "max_tokens": 1, "temperature": 0, "stream": True}
    chat = await _try_stream(server, "/chat/completions", base | {"messages": _TURNS[:1]})
    if chat is None:  # some hosted models take the limit under its newer name alone, and no temperature
        newer = {"model": model, "stream": True, "max_completion_tokens": 16, "messages": _TURNS[:1]}
        chat = await _try_stream(server, "/chat/completions", newer)
    completion = await _try_stream(server, "/completions", base | {"prompt": "Count to nine."})
    if chat is None and completion is None:
        raise ConfigError(f"model.url = {server.url!r}: neither /chat/completions nor /completions works there")
    streams = [stream for stream in (chat, completion) if stream is not None]
    ids = next((stream.prompt_ids for stream in streams if stream.prompt_ids), None)
    by_ids = completion is not None and ids is not None
    return Capabilities(
        chat=chat is not None,
        completions=completion is not None,
        context_tokens=context,
        usage=all(stream.usage for stream in streams),
        token_ids=all(stream.token_ids for stream in streams),
        token_prompts=by_ids and await _try_stream(server, "/completions", base | {"prompt": ids}) is not None,
        tokenizes=by_ids and await tokenize(server, model, "one two") is not None,
    )


@dataclass(slots=True)
class _Stream:
    usage: bool = False
    token_ids: bool = False
    prompt_ids: list[int] | None = None


async def _try_stream(server: Server, path: str, body: Json) -> _Stream | None:
    """Request a one-token stream, with fewer extra fields if the server refuses them; None if it refuses them all."""
    extras = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    for more in (extras, {"stream_options": extras["stream_options"]}, {}):
        stream = _Stream()
        try:
            async with server.stream(path, body | more | server.unpaired_fields) as chunks:
                async for chunk in chunks:
                    _inspect(stream, chunk)
        except InvalidRequest as error:
            log.debug("%s%s with %s: %s", server.url, path, list(more), error.message)
        else:
            return stream
    return None


def _inspect(stream: _Stream, chunk: Json) -> None:
    stream.usage = stream.usage or isinstance(chunk.get("usage"), dict)
    for choice in chunk.get("choices") or ():
        stream.token_ids = stream.token_ids or bool(choice.get("token_ids"))
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        stream.prompt_ids = prompt or stream.prompt_ids


async def tokenize(server: Server, model: str, text: str) -> list[int] | None:
    """Return the token ids of a text in the middle of a prompt; None if the server does not tokenize.

    vLLM and llama.cpp name the text's field differently.
    """
    body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False, "add_special": False}
    try:
        tokens = (await server.post("/tokenize", body, versioned=False)).get("tokens")
    except TrinityError:
        return None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


async def _continues_chats(server: Server, model: str) -> bool:
    """Whether the server continues a last turn: the prompt is then shorter, without that turn's end and a new start."""
    body = {"model": model, "max_tokens": 1, "temperature": 0, "messages": _TURNS} | server.unpaired_fields
    try:
        closed, open_ = [
            (await server.post("/chat/completions", body | more))["usage"] for more in ({}, CONTINUE_LAST_TURN)
        ]
        return bool(open_["prompt_tokens"] < closed["prompt_tokens"])
    except (TrinityError, KeyError, TypeError):
        return False


async def _renders_chats(server: Server) -> bool:
    try:
        rendered = await server.post("/apply-template", {"messages": _TURNS[:1]}, versioned=False)
        return isinstance(rendered.get("prompt"), str)
    except TrinityError:
        return False


def check_servers(section: OpenAiSection) -> list[tuple[str, Capabilities | TrinityError]]:
    """Return each server's URL with its capabilities, or the error. Raises ConfigError for the key's file."""
    servers = servers_of(section, read_engine_key(section))

    async def check(server: Server) -> Capabilities | TrinityError:
        try:
            return await detect_capabilities(server, section)
        except TrinityError as error:
            return error
        finally:
            await server.close()

    async def check_all() -> list[Capabilities | TrinityError]:
        return await asyncio.gather(*map(check, servers))

    return list(zip([server.url for server in servers], asyncio.run(check_all()), strict=True))
