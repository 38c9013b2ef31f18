"""OpenAI's lists: their parameters `limit`, `order`, `after` and `before`, and their pages."""

from collections.abc import Mapping, Sequence

from runtime.errors import InvalidRequest
from runtime.retrieval.stores.catalogue import Page
from runtime.serving.http.responses import Json

MAX_LISTED = 100
MAX_FILES_LISTED = 10_000
_DEFAULT_LISTED = 20


def page_of(query: Mapping[str, str], most: int = MAX_LISTED, default: int = _DEFAULT_LISTED) -> Page:
    """Return the page that a query asks for. Raises InvalidRequest."""
    limit, order = query.get("limit", str(default)), query.get("order", "desc")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise InvalidRequest(f"limit is {limit[:32]!r}, allowed are 1 to {most}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:32]!r}, allowed are asc and desc", "order")
    return Page(int(limit), order == "desc", query.get("after", ""), query.get("before", ""))


def list_json(data: Sequence[Json], more: bool) -> Json:
    """Return a list's page."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": more}


def page_names(names: list[str], page: Page) -> tuple[list[str], bool]:
    """Return one page of names, newest first, and whether more follow. Raises InvalidRequest."""
    for edge, name in (("after", page.after), ("before", page.before)):
        if name and name not in names:
            raise InvalidRequest(f"{edge} is {name[:128]!r}, and no vector store has that id", edge)
    if not page.descending:
        names = names[::-1]
    if page.after:
        names = names[names.index(page.after) + 1 :]
    if page.before:
        names = names[: names.index(page.before)] if page.before in names else []
        return names[-page.limit :], len(names) > page.limit
    return names[: page.limit], len(names) > page.limit
