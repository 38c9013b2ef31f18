"""Server-sent events, as OpenAI's streams have them: one JSON value a `data:` line, `[DONE]` at the end."""

from collections.abc import AsyncIterator

from runtime.errors import EngineFailed

MAX_EVENT_BYTES = 8 << 20
DONE = b"[DONE]"


async def payloads(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events' data, the end mark too. Raises EngineFailed for an event of more than `MAX_EVENT_BYTES`."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part if rest else part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > MAX_EVENT_BYTES:
            raise EngineFailed(f"the engine's stream has an event of over {MAX_EVENT_BYTES} bytes")
    if rest.startswith(b"data:"):
        yield rest[5:].strip()
