"""docs/http.md agrees with the code: its tables are compared with the code's."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_type_hints

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from pydantic import BaseModel

from runtime.errors import InternalError, TrinityError
from runtime.node.config import HttpSection
from runtime.retrieval.stores.service import Stores
from runtime.retrieval.writer_service import WriterService
from runtime.serving.frontend.requests import ClientDisconnected
from runtime.serving.http.api_types import ChatBody, CompletionBody, GenerateBody
from runtime.serving.http.connections import Timeouts
from runtime.serving.http.retrieval_body import RetrievalBody
from runtime.serving.http.service import Settings
from runtime.serving.http.unsupported_fields import IGNORED, NEUTRAL, unsupported_table

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def cells(title: str) -> Iterator[list[str]]:
    """The rows of the first table under a title."""
    section = re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    for row in rows[2:]:
        yield [cell.strip() for cell in row.strip("|").split("|")]


def named(title: str) -> set[str]:
    """Return the names in the first column."""
    return {name for row in cells(title) for name in re.findall(r"`([^`]+)`", row[0])}


def test_the_documented_unsupported_fields_are_those_of_the_code() -> None:
    assert unsupported_table() in PAGE, f"put this into docs/http.md:\n{unsupported_table()}"
    assert all(f"`{name}`" in PAGE for name in IGNORED)


@pytest.mark.parametrize(
    ("title", "fields"),
    [
        ("Both completions", set(GenerateBody.model_fields)),
        ("Chat only", set(ChatBody.model_fields) - set(GenerateBody.model_fields)),
        ("Completions only", set(CompletionBody.model_fields) - set(GenerateBody.model_fields)),
        ("Search", set(RetrievalBody.model_fields)),
    ],
)
def test_every_accepted_field_is_documented(title: str, fields: set[str]) -> None:
    assert named(title) == fields


@pytest.mark.parametrize(
    ("module", "body"), [(chat_params, ChatBody), (completion_params, CompletionBody)], ids=["chat", "completions"]
)
def test_every_field_of_openais_client_is_documented(module: object, body: type[BaseModel]) -> None:
    theirs = get_type_hints(module.CompletionCreateParamsBase)  # type: ignore[attr-defined]
    assert {"model", "n", "user"} <= set(theirs)
    assert set(theirs) - set(body.model_fields) - set(NEUTRAL) - IGNORED == set()


def test_every_error_is_documented() -> None:
    said = dict[str, int]()
    for codes, statuses, _ in cells("Errors"):
        names, numbers = re.findall(r"`([^`]+)`", codes), [int(number) for number in statuses.split(", ")]
        said |= dict(zip(names, numbers if len(numbers) > 1 else numbers * len(names), strict=True))
    kinds = {kind for kind in _family(TrinityError) if kind.status != 500} - {ClientDisconnected} | {InternalError}
    by_hand = {"not_found": 404, "method_not_allowed": 405}
    assert said == {kind.code: kind.status for kind in kinds} | by_hand


def _family(root: type[TrinityError]) -> set[type[TrinityError]]:
    """All of `runtime`'s own (tests may have some that live in this process too)."""
    found = {root} if root.__module__.startswith("runtime.") else set()
    return found.union(*(_family(kind) for kind in root.__subclasses__()))


def test_the_connection_defaults_are_documented() -> None:
    timeouts = {f"({field.name.removesuffix('_s')})": field.default for field in fields(Timeouts)}
    http = HttpSection()
    keys = {"(connections)": http.max_connections, "(one peer)": http.max_connections_per_peer}
    said = {key: float(default.removesuffix(" s")) for key, default, _ in cells("Connections")}
    assert said == timeouts | keys | {"(body)": Settings().body_timeout_s}


async def _drain(wanted: bool) -> None:
    """A supervisor that keeps nothing."""


def test_every_endpoint_is_documented() -> None:
    from runtime.serving.http.app import create_app
    from runtime.serving.http.service import Service
    from tests.frontend.cluster import FakeSearch, metrics
    from tests.frontend.link_harness import LinkHarness

    harness, writes = LinkHarness(), cast(WriterService, object())  # of which only the routes' existence is asked
    try:
        stores = cast(Stores, SimpleNamespace(max_file_bytes=1))
        app = create_app(
            Service(harness.link, FakeSearch(), metrics, writes=writes, stores=stores, drain=_drain), Settings()
        )
    finally:
        harness.link.close()
    paths = {route.path.replace(":path", "").replace("{traced}", "{id}") for route in app.routes}  # type: ignore[attr-defined]
    assert {name.rpartition(" ")[2] for name in named("Endpoints")} == paths
