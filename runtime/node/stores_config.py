"""`[stores]`: vector stores and files that clients create over HTTP, and stored responses."""

from typing import Annotated

from msgspec import Meta

from runtime.node.engine_config import FilePath, Section

STORES = "@stores"
"""Internal name of the collection of all stores' passages; a configuration cannot contain it."""
STORE_PREFIX = "vs_"
"""Of the ids of the stores that clients make, as OpenAI's."""


class StoresSection(Section, frozen=True):
    """Vector stores and files that clients create over HTTP (docs/collections.md, "Vector stores").

    - `path`: directory of the files, of the stores' passages and of stored responses, created if it is missing. "":
      no files and no new stores; responses are then stored in memory, and end with the frontend.
    - `max_mib`: maximum size of all files and stores together.

    Passages are embedded by all-minilm-l6-v2. A file has at most 512 MiB. At most 10,000 stores and 100,000 files are
    kept; of responses at most 10,000 and 256 MiB, for 30 days, the oldest are removed first. An API key that is
    restricted to collections has files, stores and responses of its own, and at most half of what the others leave of
    each limit.
    """

    path: FilePath = ""
    max_mib: Annotated[int, Meta(ge=1, le=1 << 24)] = 10_240
