"""How a benchmark says what it found: a table, a file of figures, a plot; one way for all of them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown; all columns but the first are set to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["|" + "|".join(f" {cell} " if str(cell) else " " for cell in line) + "|" for line in lines]


def write(found: Any, text: str, out: Path | None) -> None:
    """Print what was found; with `out` also write it as `out`.md, and what it tells of as `out`.json."""
    print(text)
    if out is not None:
        keep(found, text, out)


def keep(found: Any, text: str, out: Path) -> None:
    """Write `out`.md and `out`.json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(found, indent=1, default=_builtins)
    out.with_name(f"{out.name}.json").write_text(figures + "\n", encoding="utf-8")
    out.with_name(f"{out.name}.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _builtins(value: Any) -> Any:
    import msgspec  # here, since not every benchmark's machine has it: those without keep nothing but dicts and lists

    return msgspec.to_builtins(value)


@contextmanager
def plot(path: Path, columns: int, rows: int = 1, *, width: float = 4.5, height: float = 3.6) -> Iterator[list[Any]]:
    """Axes of `columns` · `rows` panels of so many inches, row by row; they are drawn into `path` in the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    yield list(figure.subplots(rows, columns, squeeze=False).ravel())
    figure.savefig(path, dpi=100)
