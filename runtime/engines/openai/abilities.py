"""What a server can do, found by asking it: a handful of requests of one token each."""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

from runtime.engines.openai.server import Server
from runtime.errors import ConfigError, EngineFailed, EngineRefusedKey, EngineUnreachable, InvalidRequest, TrinityError
from runtime.node.engine_config import OpenAiSection, ServedSection
from runtime.node.placement.plan import read_engine_key

log = logging.getLogger(__name__)

Json = dict[str, Any]
Way = Literal["tokens", "chat", "text", ""]

_ANSWER_S = 60.0  # for a handful of answers of one token
_TURNS = [{"role": "user", "content": "Count to nine."}, {"role": "assistant", "content": "One two three"}]
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
"""What has a server take a chat's last turn, the assistant's, for the beginning of its answer."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """`context_tokens` 0: the server does not tell.

    `usage`: it counts tokens in streams (`stream_options`); `token_ids`: it tells them (`return_token_ids`);
    `token_prompts`: a completion's prompt may be token ids; `tokenizes`: it turns text into them (`/tokenize`);
    `goes_on`: it continues a chat's last turn; `renders`: it shows a chat as text (`/apply-template`).
    """

    chat: bool = True
    completions: bool = True
    context_tokens: int = 0
    usage: bool = True
    token_ids: bool = False
    token_prompts: bool = False
    tokenizes: bool = False
    goes_on: bool = False
    renders: bool = False

    @property
    def by_tokens(self) -> bool:
        """Whether an answer can go on in another request from its very tokens."""
        return self.token_ids and self.token_prompts and self.tokenizes and self.completions

    @property
    def chat_sequel(self) -> Way:
        """How a chat's answer goes on in another request; "" if it cannot."""
        if self.by_tokens:
            return "tokens"
        if self.goes_on:
            return "chat"
        return "text" if self.renders and self.completions else ""

    def lacking(self) -> list[str]:
        """What users will miss, a sentence each."""
        found = []
        if not self.chat:
            found.append("no chats: /chat/completions is refused")
        if not self.completions:
            found.append("no completions: /completions is refused")
        if self.chat and not self.chat_sequel:
            found.append(
                "no probes in chats, and none goes on elsewhere when the server is lost: it neither tells token ids and"
                " tokenizes, nor continues a chat's last turn, nor renders a chat"
            )
        if not self.usage:
            found.append("no usage: it drops stream_options, so stream_options.include_usage is refused")
        if not self.token_ids:
            found.append("no token ids: return_token_ids is refused")
        return found

    def __str__(self) -> str:
        context = f"context {self.context_tokens}" if self.context_tokens else "context not told"
        ways = {
            "tokens": "by token ids, exact",
            "chat": "by continue_final_message",
            "text": "by rendered text",
            "": "none",
        }
        return f"{context}; probes in chats: {ways[self.chat_sequel]}"


async def ask(server: Server, section: ServedSection) -> Abilities:
    """Ask a server. Raises EngineUnreachable, Overloaded or EngineFailed if it does not answer as it should now, and
    ConfigError for what no waiting mends: a key that it refuses, a model that it lacks, a context that is too short.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await _ask(server, section)
    except TimeoutError:
        raise EngineUnreachable(f"{server.url} does not answer within {_ANSWER_S:.0f} s") from None
    except EngineRefusedKey as error:
        raise ConfigError(f"model.api_key_file: {error.message}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of a value that is not of the type it ought to
        raise EngineFailed(f"{server.url}: an answer of it makes no sense: {str(error)[:200]}") from error


async def _ask(server: Server, section: ServedSection) -> Abilities:
    context = await _model(server, section)
    found = await _streams(server, section.name, context)
    if not found.by_tokens and found.chat:
        goes_on = await _goes_on(server, section.name)
        found = replace(found, goes_on=goes_on, renders=await _renders(server))
    return found


async def _model(server: Server, section: ServedSection) -> int:
    """The context of the model there, 0 if it is not told."""
    try:
        listed = (await server.get("/models")).get("data")
    except InvalidRequest as error:
        raise ConfigError(
            f"model.url = {server.url!r}: there is no /models ({error.message}): give the address up to its /v1"
        ) from error
    models = (
        {str(model.get("id")): model for model in listed if isinstance(model, dict)} if isinstance(listed, list) else {}
    )
    if section.name not in models:
        there = ", ".join(repr(name) for name in list(models)[:10]) or "none"
        raise ConfigError(
            f"model.name = {section.name!r}: {server.url} has no such model; give one that it has: {there}"
        )
    told = models[section.name]
    meta = told.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    sizes = (told.get("max_model_len"), told.get("context_length"), meta.get("n_ctx"), meta.get("n_ctx_train"))
    context = next((size for size in sizes if isinstance(size, int) and size > 0), 0)
    if context and section.context_tokens > context:
        raise ConfigError(
            f"model.context_tokens = {section.context_tokens}: {server.url} has a context of {context}; say so here, "
            "or start it with a longer one"
        )
    return context


async def _streams(server: Server, model: str, context: int) -> Abilities:
    base = {"model": model, "max_tokens": 1, "temperature": 0, "stream": True}
    chat = await _tried(server, "/chat/completions", base | {"messages": _TURNS[:1]})
    if chat is None:  # some hosted models take the limit under its newer name alone, and no temperature
        newer = {"model": model, "stream": True, "max_completion_tokens": 16, "messages": _TURNS[:1]}
        chat = await _tried(server, "/chat/completions", newer)
    completion = await _tried(server, "/completions", base | {"prompt": "Count to nine."})
    if chat is None and completion is None:
        raise ConfigError(f"model.url = {server.url!r}: it answers neither /chat/completions nor /completions")
    streams = [found for found in (chat, completion) if found is not None]
    ids = next((found.prompt_ids for found in streams if found.prompt_ids), None)
    by_ids = completion is not None and ids is not None
    return Abilities(
        chat=chat is not None,
        completions=completion is not None,
        context_tokens=context,
        usage=all(found.usage for found in streams),
        token_ids=all(found.told_ids for found in streams),
        token_prompts=by_ids and await _tried(server, "/completions", base | {"prompt": ids}) is not None,
        tokenizes=by_ids and await tokens_of(server, model, "one two") is not None,
    )


@dataclass(slots=True)
class _Stream:
    usage: bool = False
    told_ids: bool = False
    prompt_ids: list[int] | None = None


async def _tried(server: Server, path: str, body: Json) -> _Stream | None:
    """What a one-token stream brings; asked for less if the server refuses extras; None if it refuses that too."""
    extras = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    for more in (extras, {"stream_options": extras["stream_options"]}, {}):
        found = _Stream()
        try:
            async with server.stream(path, body | more) as chunks:
                async for chunk in chunks:
                    _note(found, chunk)
        except InvalidRequest as error:
            log.debug("%s%s with %s: %s", server.url, path, list(more), error.message)
        else:
            return found
    return None


def _note(found: _Stream, chunk: Json) -> None:
    found.usage = found.usage or isinstance(chunk.get("usage"), dict)
    for choice in chunk.get("choices") or ():
        found.told_ids = found.told_ids or bool(choice.get("token_ids"))
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        found.prompt_ids = prompt or found.prompt_ids


async def tokens_of(server: Server, model: str, text: str) -> list[int] | None:
    """The token ids of a text in the middle of a prompt; None if the server does not tell. vLLM and llama.cpp call the
    text by different names."""
    body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False, "add_special": False}
    try:
        tokens = (await server.post("/tokenize", body, beside=True)).get("tokens")
    except TrinityError:
        return None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


async def _goes_on(server: Server, model: str) -> bool:
    """Whether the prompt gets shorter when the last turn is to be continued: no end of that turn, no new one begun."""
    body = {"model": model, "max_tokens": 1, "temperature": 0, "messages": _TURNS}
    try:
        closed, open_ = [(await server.post("/chat/completions", body | more))["usage"] for more in ({}, GOES_ON)]
        return bool(open_["prompt_tokens"] < closed["prompt_tokens"])
    except (TrinityError, KeyError, TypeError):
        return False


async def _renders(server: Server) -> bool:
    try:
        shown = await server.post("/apply-template", {"messages": _TURNS[:1]}, beside=True)
        return isinstance(shown.get("prompt"), str)
    except TrinityError:
        return False


def reach(section: OpenAiSection) -> list[tuple[str, Abilities | TrinityError]]:
    """Each server by its URL, and what it can do, or why it cannot serve. Raises ConfigError for a key's file."""
    key = read_engine_key(section)

    async def one(url: str) -> Abilities | TrinityError:
        server = Server(url, key, section.connect_s)
        try:
            return await ask(server, section)
        except TrinityError as error:
            return error
        finally:
            await server.close()

    async def every() -> list[Abilities | TrinityError]:
        return await asyncio.gather(*(one(url) for url in section.urls))

    return list(zip(section.urls, asyncio.run(every()), strict=True))
