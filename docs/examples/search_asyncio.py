"""Concurrent searches from one event loop.

python docs/examples/search_asyncio.py NODE QUERIES.npy
"""

import asyncio
import sys

import numpy as np

from runtime import AsyncSearchClient
from runtime.errors import TrinityError


async def main(node: str, path: str) -> None:
    queries = np.load(path)
    async with await AsyncSearchClient.connect(node) as client:
        searches = [client.search(vector, k=5, deadline_ms=1000) for vector in queries]
        for result in await asyncio.gather(*searches):
            print(result.ids.tolist())


if len(sys.argv) != 3:
    print("usage: python docs/examples/search_asyncio.py NODE QUERIES.npy", file=sys.stderr)
    sys.exit(2)
try:
    asyncio.run(main(*sys.argv[1:]))
except (OSError, EOFError, TypeError, ValueError) as error:
    sys.exit(f"{sys.argv[2]}: {error}")
except TrinityError as error:
    sys.exit(error.message)
