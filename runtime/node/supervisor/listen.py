"""The HTTP socket: bound once by the supervisor, before anything starts, and handed to each frontend it starts."""

import errno
import ipaddress
import socket
from typing import Any

from runtime.errors import ConfigError, ResourceBusy
from runtime.node.config import HttpSection

Address = tuple[Any, ...]


def check_host(http: HttpSection) -> tuple[socket.AddressFamily, Address]:
    """Where HTTP would listen. Raises `ConfigError` for no address, or if strangers could ask without a key."""
    try:
        family, _, _, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that no host name can have
        raise ConfigError(f"http.host = {http.host!r}: {getattr(error, 'strerror', error)}") from error
    if not ipaddress.ip_address(address[0]).is_loopback and not http.api_keys_file:
        raise ConfigError(
            f"http.host = {http.host!r} is open to others: set http.api_keys_file, or listen on 127.0.0.1"
        )
    return family, address


def listen(http: HttpSection) -> socket.socket:
    """A listening socket. Raises `ResourceBusy` if the port is taken, `ConfigError` if the address is none of this
    machine's, or if strangers could ask without a key."""
    family, address = check_host(http)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        kind_of_error = ResourceBusy if error.errno == errno.EADDRINUSE else ConfigError
        raise kind_of_error(f"http.port = {http.port}: cannot listen on {http.host}: {error.strerror}") from error
    return listener
