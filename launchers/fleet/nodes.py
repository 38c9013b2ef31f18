"""The nodes of a fleet, and where the balancer in front of them listens, as a command line names them."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from runtime.errors import InvalidRequest

CONVERSATION = "x-conversation-id"
"""The header that `--sticky conversation` goes by."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. `host` is a name, an IPv4 address, or an IPv6 address without its brackets."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def node_addresses(urls: Sequence[str]) -> list[Address]:
    """Of the nodes' URLs. Raises InvalidRequest for none, one twice, or one that is no `http://HOST:PORT`."""
    found = [_address(url, "--node", "http://") for url in urls]
    if not found:
        raise InvalidRequest("no node: say --node http://HOST:PORT for each of them")
    if twice := [str(address) for address in found if found.count(address) > 1]:
        raise InvalidRequest(f"--node {twice[0]} stands there twice")
    return found


def listen_address(text: str) -> Address:
    """Of `HOST:PORT`. Raises InvalidRequest."""
    return _address(text, "--listen", "")


def _address(text: str, option: str, scheme: str) -> Address:
    try:
        parts = urlsplit(text if scheme else f"http://{text}")
        if parts.scheme != "http" or not parts.hostname or not parts.port or parts.netloc.count("@"):
            raise ValueError
        if parts.path.strip("/") or parts.query or parts.fragment or any(c.isspace() for c in text):
            raise ValueError
    except ValueError:
        raise InvalidRequest(f"{option} is {text[:128]!r}: it must look like {scheme}HOST:PORT") from None
    return Address(parts.hostname, parts.port)
