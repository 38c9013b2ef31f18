"""Whether the servers of a configuration can serve it, asked from outside a node: `trinity doctor`."""

import asyncio

from runtime.engines.openai.abilities import Abilities, ask
from runtime.engines.openai.server import Server
from runtime.errors import TrinityError
from runtime.node.config import OpenAiSection
from runtime.node.placement.plan import read_engine_key


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
