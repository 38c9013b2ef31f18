"""Many queries of one event loop, all outstanding at once.

python docs/examples/search_asyncio.py NODE QUERIES.npy
"""

import asyncio
import sys

import numpy as np

from runtime import AsyncSearchClient


async def main(node: str, path: str) -> None:
    async with await AsyncSearchClient.connect(node) as client:
        asked = [client.search(vector, k=5, deadline_ms=1000) for vector in np.load(path)]
        for result in await asyncio.gather(*asked):
            print(result.ids.tolist())


asyncio.run(main(sys.argv[1], sys.argv[2]))
