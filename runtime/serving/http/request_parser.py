"""Parsing of HTTP requests by httptools (llhttp), with the limits and checks that it lacks.

llhttp bounds neither heads nor trailers, requires no Host header, and accepts versions and transfer encodings that
nothing here speaks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httptools

from runtime.errors import InvalidRequest
from runtime.serving.http.middleware import DISCARD_BYTES, MAX_BODY_BYTES, BodyTooLarge

_HEADER_BYTES = 16 << 10  # of a head, of trailers, and of what is between two parts of a body
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#@]*@)?([^/?#@]+)(/[^?#]*)?((?:[?#].*)?)", re.IGNORECASE | re.DOTALL)
_HTTP2, _OVERFLOW = "Pause on PRI/Upgrade", "Content-Length overflow"  # llhttp's texts


class NotHttp(InvalidRequest):
    """What was received is not valid HTTP, or of a kind that is not supported."""


class HeadTooLarge(InvalidRequest):
    """A request's head, its trailers, or what is between two parts of its body is too large."""

    code = "header_too_large"
    status = 431


class NotImplementedEncoding(InvalidRequest):
    """A transfer encoding other than chunked."""

    code = "not_implemented"
    status = 501


class VersionNotSupported(InvalidRequest):
    """Another major version of HTTP."""

    code = "http_version_not_supported"
    status = 505


@dataclass(slots=True)
class Head:
    """The head of a request. Header names are in lower case; `target` is a path with its query, or `*`."""

    method: str
    target: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    expects_continue: bool


class Body(Protocol):
    """Where the body of a request goes."""

    ended: bool
    """Whether the request is answered: the rest of its body is discarded."""

    def add_body(self, part: bytes) -> None: ...

    def end_body(self) -> None: ...


class Discarded:
    """The body of a request that is answered already."""

    ended = True

    def add_body(self, part: bytes) -> None:
        """Keep nothing."""

    def end_body(self) -> None:
        """Nothing waits for it."""


class Requests:
    """The requests of a connection. `on_head` is called with each head, and returns where its body goes."""

    def __init__(self, on_head: Callable[[Head], Body]) -> None:
        self._on_head = on_head
        self._parser = self._new_parser()
        self.in_head = False
        """Whether the head of a request has arrived in part."""
        self.arriving: Body | None = None
        """The request whose body is arriving."""
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._tail = b""  # of a head that is arriving
        self._left = 0  # bytes of a body of known length, or of a chunk
        self._chunked, self._line = False, b""
        self._between = 0  # bytes since the last part of a body, or the last end of a head
        self._complete = False
        self._error: InvalidRequest | None = None

    @property
    def complete(self) -> bool:
        """Whether all requests have arrived that have begun, and nothing after them."""
        return not self.in_head and self.arriving is None and not self._between

    def feed(self, data: bytes) -> bytes:
        """Parse more data, up to the end of a request; return what follows it.

        Raises `InvalidRequest` once; the connection has to end then.
        """
        if self.complete:
            data = data.lstrip(b"\r\n")  # line breaks between requests mean nothing (RFC 9112, 2.2)
        self._complete = False
        while data and self._error is None and not self._complete:
            part = self._next_part(data)
            self._between += len(part)
            data = data[len(part) :]
            try:
                self._parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + part[upgrade.args[0] :] + data
            except httptools.HttpParserError as error:
                self._error = self._error or _refusal(str(error))
        if self._error is None and self._between > _HEADER_BYTES:
            self._error = HeadTooLarge(f"a request's head, or its trailers, exceed {_HEADER_BYTES} bytes")
        if self._error is not None:
            raise self._error
        return data

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request with "Connection: close" is ignored, not an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _without_upgrade(self) -> bytes:
        """Return the head again without its wish for another protocol: llhttp would not parse the body behind it."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        self._parser, self._tail = self._new_parser(), b""
        lines = (b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version, b"".join(lines))

    def _next_part(self, data: bytes) -> bytes:
        """Return the data up to where it is known how to go on: the end of a body, a chunk, a line or a head."""
        if not self._left:
            return self._line_of(data) if self._chunked else self._until_body(data)
        part = data[: self._left]
        self._left -= len(part)
        return part

    def _until_body(self, data: bytes) -> bytes:
        end = (self._tail + data).find(b"\r\n\r\n")
        part = data if end < 0 else data[: end + 4 - len(self._tail)]
        self._tail = (self._tail + part)[-3:]
        return part

    def _line_of(self, data: bytes) -> bytes:
        """Return a line, so that a chunk's size is known when `on_chunk_header` is called."""
        part = data[: data.find(b"\n") + 1 or len(data)]
        self._line = (b"" if self._line.endswith(b"\n") else self._line) + part
        return part

    # ---- called by httptools

    def on_message_begin(self) -> None:
        self.in_head, self._target, self._headers = True, b"", []

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:
            self._headers.append((name.lower(), value.rstrip(b" \t")))
        elif name.lower() == b"connection":  # in a trailer: llhttp would ignore all that follows
            self._error = self._error or _refusal("Connection in a trailer")

    def on_headers_complete(self) -> None:
        self.in_head, self._between, self._tail = False, 0, b""
        if self._error is not None:
            return
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            return  # it comes again, see `_without_upgrade`
        try:
            self.arriving = self._on_head(self._checked_head())
        except InvalidRequest as error:
            self._error = error

    def on_chunk_header(self) -> None:
        size = int(self._line.partition(b";")[0], 16)
        if size > MAX_BODY_BYTES + DISCARD_BYTES:  # of a smaller one the rest is discarded, and the client answered
            self._error = BodyTooLarge(f"a chunk of its body has {size} bytes, the limit is {MAX_BODY_BYTES}")
        self._left = size

    def on_body(self, part: bytes) -> None:
        self._between = 0
        if self.arriving is not None and not self.arriving.ended:
            self.arriving.add_body(part)

    def on_message_complete(self) -> None:
        self._between, self._chunked = 0, False
        if self.arriving is not None and self._error is None:
            self._complete, arrived, self.arriving = True, self.arriving, None
            arrived.end_body()

    def _checked_head(self) -> Head:
        """Return the head. Raises `InvalidRequest`, also for what a proxy in front could interpret differently (request
        smuggling)."""
        version, headers, target = self._parser.get_http_version(), self._headers, self._target
        if not version.startswith("1."):
            raise _version_refusal(version)
        if self._parser.get_method() == b"CONNECT":
            raise _refusal("this is no proxy: CONNECT is not supported")
        hosts, encodings, expects_continue = 0, [], False
        for name, value in headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                encodings.append(value.lower())
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"expect":
                expects_continue = value.lower() == b"100-continue" and version != "1.0"
        encoding = b", ".join(encodings)
        if encoding and version == "1.0":
            raise _refusal("Transfer-Encoding in HTTP/1.0")
        self._chunked, self._line = encoding == b"chunked", b""
        if encoding not in (b"", b"chunked"):
            raise NotImplementedEncoding("this is not valid HTTP: only the Transfer-Encoding chunked is supported")
        if hosts != 1 and (hosts or version != "1.0"):
            raise _refusal("Found multiple Host: headers" if hosts else "Missing mandatory Host: header")
        if not target.startswith(b"/") and (absolute := _ABSOLUTE.fullmatch(target)) is not None:
            host, path, query = absolute.groups()
            # The target's host replaces the header's (RFC 9112, 3.2.2).
            headers[:] = [(b"host", host), *(header for header in headers if header[0] != b"host")]
            target = (path or b"/") + query
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        return Head(self._parser.get_method().decode(), target, version, headers, keep_alive, expects_continue)


def _refusal(reason: str) -> InvalidRequest:
    if reason == _OVERFLOW:
        return BodyTooLarge(f"the body's Content-Length is beyond any limit; the limit is {MAX_BODY_BYTES}")
    return _version_refusal("2.0") if reason == _HTTP2 else NotHttp(f"this is not valid HTTP: {reason[:128]}")


def _version_refusal(version: str) -> InvalidRequest:
    return VersionNotSupported(f"this is not valid HTTP: its version is {version}; use HTTP/1.1")
