"""The section of collections whose shards are on other nodes."""

from typing import Annotated, Literal

from msgspec import Meta

from runtime.node.engine_config import Section

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
Url = Annotated[str, Meta(pattern=r"^https?://[A-Za-z0-9.:\[\]-]+(/v1)?/?\Z")]


class RemoteSection(Section, frozen=True):
    """A collection whose shards are on other nodes: `name` in requests here; each node, by its URL, has a part of the
    documents, in a collection that it calls `collection` ("": the same).

    A search asks all of them at once, and the nearest of all are found. A node has `timeout_s` to answer. Where one
    does not, or is down, the search ends with an error if `missing` is "refuse"; with "partial" the answer has what the
    others found, and says so. `api_key_file` holds the key that the nodes ask for on its first line. The nodes'
    collections must have one embedder and metric.
    """

    name: Name
    nodes: Annotated[tuple[Url, ...], Meta(min_length=1, max_length=64)]
    collection: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?\Z")] = ""
    missing: Literal["refuse", "partial"] = "refuse"
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    api_key_file: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """The nodes', without what may stand behind the port."""
        return tuple(url.lower().rstrip("/").removesuffix("/v1") for url in self.nodes)
