"""Which requests are refused as soon as their heads have arrived: before their bodies, a task and the routes.

An overloaded process can only answer in time if a refusal takes far less of its time than an answer. What counts is the
number of requests in progress, from when a request has arrived in full until the application begins to respond: neither
a client that sends its body slowly nor one that does not read keeps others out.
"""

from collections.abc import Callable, Mapping

from runtime.retrieval.fair_gate import FairLimit
from runtime.serving.http.request_parser import Head


class Admission:
    """Limits of POST requests by path. Requests to other paths (health, metrics, generation, …) are never refused here.

    draining: then responses close their connections, which the application does.
    """

    def __init__(self, limits: Mapping[str, FairLimit], draining: Callable[[], bool] = lambda: False) -> None:
        self._limits, self._draining = limits, draining

    def admit(self, head: Head, path: str) -> FairLimit | None:
        """Return the limit that a request counts in; None: none, or the application decides whether it has room.

        Raises `Overloaded` if the request is refused.
        """
        limit = self._limits.get(path) if head.method == "POST" else None
        if limit is None or not limit.full:
            return limit
        if not head.keep_alive or head.expects_continue or self._draining():
            return None
        for name, _ in head.headers:
            if name == b"origin":  # of a page: it sees only responses with CORS headers
                return None
        raise limit.refusal()
