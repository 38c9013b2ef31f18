"""A build that can be killed while it reads its documents: they take it seconds."""

from pathlib import Path

from runtime.testing.waiting import eventually

_DOCUMENTS = 300_000


def long_source(directory: Path) -> Path:
    """A file of very many documents."""
    source = directory / "d.jsonl"
    source.write_text("".join(f'{{"id": "{number}", "text": "a note"}}\n' for number in range(_DOCUMENTS)))
    return source


def wait_until_it_reads(out: Path) -> None:
    """Until a build of `out` has its directory, which it makes before it reads."""
    eventually(lambda: out.parent.is_dir() and any(out.parent.iterdir()), 60, "the build to begin")
