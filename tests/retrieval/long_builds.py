"""A build that reads its documents for seconds, so that it can be killed meanwhile."""

from pathlib import Path

from runtime.testing.waiting import eventually

_DOCUMENTS = 300_000


def long_source(directory: Path) -> Path:
    """Write a file of very many documents."""
    source = directory / "d.jsonl"
    source.write_text("".join(f'{{"id": "{number}", "text": "a note"}}\n' for number in range(_DOCUMENTS)))
    return source


def wait_until_it_reads(out: Path) -> None:
    """Wait until a build of `out` has created its directory, which precedes reading."""
    eventually(lambda: out.parent.is_dir() and any(out.parent.iterdir()), 60, "the build to begin")
