"""The nodes of a fleet, and where the balancer in front of them listens, as a command line names them."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from runtime.errors import Unavailable, UsageError
from runtime.serving.http.responses import error_json

CONVERSATION = "x-conversation-id"
"""The header that `--sticky conversation` goes by."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,251}[a-z0-9])?\Z")  # goes into configurations as it is
_HERE = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. `host` is a name, an IPv4 address, or an IPv6 address without its brackets."""

    host: str
    port: int

    @property
    def is_name(self) -> bool:
        """Whether the host must be looked up."""
        try:
            ip_address(self.host)
        except ValueError:
            return True
        return False

    @property
    def url(self) -> str:
        return f"http://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def node_addresses(urls: Sequence[str]) -> list[Address]:
    """Of the nodes' URLs. Raises UsageError for none, one twice, or one that is no `http://HOST:PORT`."""
    found = [_address(url, "--node", "http://") for url in urls]
    if not found:
        raise UsageError("no node: say --node http://HOST:PORT for each of them")
    if twice := [str(address) for address in found if found.count(address) > 1]:
        raise UsageError(f"--node {twice[0]} stands there twice")
    return found


def listen_address(text: str, nodes: Sequence[Address] = ()) -> Address:
    """Of `HOST:PORT`. Raises UsageError for what is none, or where one of the nodes listens."""
    found = _address(text, "--listen", "")
    for node in nodes:
        if node.port == found.port and (node.host == found.host or {node.host, found.host} <= _HERE):
            raise UsageError(f"--listen is {text!r}: there the node {node.url} listens")
    return found


def _address(text: str, option: str, scheme: str) -> Address:
    try:
        parts = urlsplit(text if scheme else f"http://{text}")
        if parts.scheme != "http" or not parts.hostname or not parts.port or parts.netloc.count("@"):
            raise ValueError
        if parts.path.strip("/") or parts.query or parts.fragment or any(c.isspace() for c in text):
            raise ValueError
        if not _NAME.match(parts.hostname) and ("%" in parts.hostname or not ip_address(parts.hostname)):
            raise ValueError
    except ValueError:
        raise UsageError(f"{option} is {text[:128]!r}: it must look like {scheme}HOST:PORT") from None
    return Address(parts.hostname, parts.port)


def error_text(message: str) -> str:
    """What a balancer answers where no node does: `unavailable`, in JSON, as a node says it."""
    return json.dumps(error_json(Unavailable(message)))
