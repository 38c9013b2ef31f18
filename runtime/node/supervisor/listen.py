"""Listening sockets of HTTP: bound once by the supervisor before anything starts, and inherited by every process that
accepts on them; a connection waits in their backlog while such a process restarts."""

import errno
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError, ResourceBusy
from runtime.node.config import HttpSection

Address = tuple[Any, ...]


def check_host(http: HttpSection) -> tuple[socket.AddressFamily, Address]:
    """Resolve the address that HTTP listens on. Raises `ConfigError` if it does not resolve, or if it is not loopback
    and there are no API keys."""
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
    """Open the listening socket. Raises `ResourceBusy` if the port is taken, and `ConfigError` as `check_host` does or
    if the address is not one of this machine."""
    family, address = check_host(http)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        message = f"http.port = {http.port}: cannot listen on {http.host}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            raise ResourceBusy(f"{message}: set another port, or stop what uses it (`ss -ltnp`)") from error
        raise ConfigError(message) from error
    return listener


def listen_private(path: str) -> socket.socket:
    """Open a listening unix socket to which only this user may connect, in place of one that a process left behind."""
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.fchmod(listener.fileno(), 0o600)  # the file that `bind` creates has this mode from the start
    listener.bind(path)
    listener.listen(2048)
    return listener
