"""/drain: the operator's route that changes the drain state of the node."""

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.serving.http.access import access_of
from runtime.serving.http.api import Api
from runtime.serving.http.responses import json_response

_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "via", "origin")  # of load balancers, and of pages in a browser


class NotDirect(InvalidRequest):
    """A request for one node came through a load balancer, which may choose any node, or from a page in a browser."""

    code = "not_direct"
    status = 403


async def drain(api: Api, http: Request) -> Response:
    """POST starts draining, DELETE cancels it, GET returns the state. Raises NotDirect, Forbidden."""
    access_of(http).require_operator()
    if proxied := [name for name in _PROXY_HEADERS if name in http.headers]:
        raise NotDirect(f"the request has the header {proxied[0]!r}: send it to the node itself, without a proxy")
    readiness, persist = api.service.readiness, api.service.drain
    assert persist is not None, "the route exists only with it"
    if http.method in ("POST", "DELETE"):
        wanted = http.method == "POST"
        await persist(wanted)  # the state outlives this process
        readiness.drain(wanted)
    return json_response({"draining": readiness.draining, "in_flight": len(api.service.engine.requests)})
