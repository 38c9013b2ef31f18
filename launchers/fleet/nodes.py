"""Addresses of a fleet's nodes and of the load balancer, parsed from the command line."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from runtime.errors import Unavailable, UsageError
from runtime.serving.http.responses import error_json

CONVERSATION = "x-conversation-id"
"""Header that `--sticky conversation` routes by."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,251}[a-z0-9])?\Z")  # inserted verbatim into configurations
_HERE = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. `host`: a name, an IPv4 address, or an IPv6 address without brackets."""

    host: str
    port: int

    @property
    def is_name(self) -> bool:
        """Whether the host is a name, which needs DNS."""
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
    """Parse the nodes' URLs. Raises UsageError for an empty list, duplicates, or a URL not `http://HOST:PORT`."""
    found = [_address(url, "--node", "http://") for url in urls]
    if not found:
        raise UsageError("no node given: add --node http://HOST:PORT for each")
    if twice := [str(address) for address in found if found.count(address) > 1]:
        raise UsageError(f"--node {twice[0]} is given twice")
    return found


def listen_address(text: str, nodes: Sequence[Address] = ()) -> Address:
    """Parse `HOST:PORT`. Raises UsageError if it is invalid, or the address of a node."""
    found = _address(text, "--listen", "")
    for node in nodes:
        if node.port == found.port and (node.host == found.host or {node.host, found.host} <= _HERE):
            raise UsageError(f"--listen is {text!r}: the node {node.url} already listens there")
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
        raise UsageError(f"{option} is {text[:128]!r}: expected {scheme}HOST:PORT") from None
    return Address(parts.hostname, parts.port)


def error_text(message: str) -> str:
    """Return the JSON body of the error `unavailable`, for a balancer's own responses."""
    return json.dumps(error_json(Unavailable(message)))
