"""Every HTTP answer has an `x-request-id`, errors and refusals too: the client's own, if it sent one, or else ours."""

import itertools
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
SENT_ID = re.compile(r"[!-~]{1,128}")  # what a client may call its request: visible ASCII
_PREFIXES = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl", "/v1/retrieval": "ret"}
_OTHER = "req"


def id_source(epoch: int) -> Callable[[str], str]:
    """Gives a request's id by its path, unlike that of any other request of the node (`epoch`: the frontend's)."""
    count = itertools.count(1)
    return lambda path: f"{_PREFIXES.get(path, _OTHER)}-{epoch:x}-{next(count)}"


def request_id(http: Request) -> str:
    """The node's id of a request."""
    return str(http.state.request_id)


def sent_id(http: Request) -> str:
    """What the client calls it; "" if it sent no id, or one that is longer or has other characters than it may."""
    return str(http.state.sent_id)


class RequestIds:
    """ASGI middleware: gives each request its id, and each answer the header. Goes around everything that answers."""

    def __init__(self, app: ASGIApp, new_id: Callable[[str], str]) -> None:
        self._app = app
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own, sent = self._new_id(scope["path"]), _sent(scope)
        scope.setdefault("state", {}).update(request_id=own, sent_id=sent)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = sent or own
            await send(message)

        await self._app(scope, receive, named)


def _sent(scope: Scope) -> str:
    given = Headers(scope=scope).getlist(HEADER)
    return given[0] if len(given) == 1 and SENT_ID.fullmatch(given[0]) else ""
