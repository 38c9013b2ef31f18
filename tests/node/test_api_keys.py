"""The file of API keys: what is read from it, and which files are refused."""

from pathlib import Path

import pytest

from runtime.node.api_keys import ApiKey, read_api_keys
from tests.node.test_placement import plan, refusal


@pytest.mark.parametrize("content", [b"# mine\nfirst\n\n  second \n", b"\xef\xbb\xbffirst\r\nsecond\r\n"])
def test_keys_are_read_one_a_line_without_comments_and_byte_order_mark(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    found = read_api_keys(plan(tmp_path, http={"api_keys_file": str(path)}).config)
    assert found == (ApiKey("first"), ApiKey("second"))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1e"])
def test_only_a_line_feed_ends_a_line_so_that_the_rest_of_a_value_is_no_key(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f'one notes/tenant="acme{separator}inc"\n', encoding="utf-8")
    assert read_api_keys(plan(tmp_path, http={"api_keys_file": str(path)}, collections=_two(tmp_path)).config) == (
        ApiKey("one", {"notes": ("tenant", f"acme{separator}inc")}),
    )


def test_a_key_is_bound_to_collections_and_attributes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("all\none notes/tenant=acme\ntwo  notes/tenant='acme inc=/x' docs \n")
    assert read_api_keys(plan(tmp_path, http={"api_keys_file": str(path)}, collections=_two(tmp_path)).config) == (
        ApiKey("all"),
        ApiKey("one", {"notes": ("tenant", "acme")}),
        ApiKey("two", {"notes": ("tenant", "acme inc=/x"), "docs": None}),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("secret notes/tenant", "line 2 of {}: grant 1 is neither COLLECTION nor COLLECTION/ATTRIBUTE=VALUE"),
        ("secret docs other", "line 2 of {}: grant 2 names an unknown collection; known: docs, notes"),
        ("secret docs docs/a=b", "line 2 of {}: collection 'docs' is listed twice"),
        ("first docs", "line 2 of {} repeats a key with different grants"),
        ("secret docs/a='b", "line 2 of {}: No closing quotation"),
    ],
)
def test_key_bindings_are_validated_without_showing_keys(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"first\n{line}\n")
    told = refusal(tmp_path, http={"api_keys_file": str(path)}, collections=_two(tmp_path))
    assert told == f"http.api_keys_file: {message.format(path)}"


def _two(home: Path) -> list[dict[str, str]]:
    for name in ("docs", "notes"):
        (home / name).mkdir(exist_ok=True)
    return [{"name": name, "path": str(home / name)} for name in ("docs", "notes")]


@pytest.mark.parametrize("content", [None, b"", b"# none\n", b"\xff\n", b"good\nschl\xc3\xbcssel\n", b"a\tb\n"])
def test_a_keys_file_without_usable_keys_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    assert refusal(tmp_path, http={"api_keys_file": str(path)}).startswith("http.api_keys_file: ")
