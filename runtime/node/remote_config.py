"""`[[remote]]`: collections whose shards are on other nodes."""

from typing import Annotated, Literal

from msgspec import Meta

from runtime.node.engine_config import Section

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
Url = Annotated[str, Meta(pattern=r"^https?://[A-Za-z0-9.:\[\]-]+(/v1)?/?\Z")]


class RemoteSection(Section, frozen=True):
    """A collection whose shards are on other nodes. A search queries all of them and merges the nearest documents.

    - `name`: its name in requests.
    - `nodes`: URLs of the nodes, each with a part of the documents. Their collections must have the same embedder and
      metric.
    - `collection`: name of the collection on these nodes; "": the same as `name`.
    - `timeout_s`: time that a node has to answer.
    - `missing`: if a node is down or does not answer, "refuse" ends the search with an error, "partial" returns what
      the others found, and marks the answer as partial.
    - `api_key_file`: file whose first line is the nodes' API key.
    """

    name: Name
    nodes: Annotated[tuple[Url, ...], Meta(min_length=1, max_length=64)]
    collection: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?\Z")] = ""
    missing: Literal["refuse", "partial"] = "refuse"
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    api_key_file: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the nodes, without a path."""
        return tuple(url.lower().rstrip("/").removesuffix("/v1") for url in self.nodes)
