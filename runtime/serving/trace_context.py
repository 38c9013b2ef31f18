"""The W3C trace context of the request that runs: what the client sent, handed on to servers that answer for us.

It is a context variable: a request's task has its own, and so have the tasks that it starts.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar

_FORMS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}
_NONE: Mapping[str, str] = {}

trace_context: ContextVar[Mapping[str, str]] = ContextVar("trace_context", default=_NONE)
"""The headers to send on; empty where the client sent none, or some that are not of their form."""


def trace_context_of(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Those of a request's headers; `tracestate` means nothing without `traceparent`."""
    if not _FORMS["traceparent"].fullmatch(headers.get("traceparent", "")):
        return _NONE
    return {name: headers[name] for name, form in _FORMS.items() if form.fullmatch(headers.get(name, ""))}
