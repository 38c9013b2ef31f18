"""Reports of benchmarks: Markdown tables, JSON results, plots."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are right-aligned."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["|" + "|".join(f" {cell} " if str(cell) else " " for cell in line) + "|" for line in lines]


def write(results: Any, text: str, out: Path | None) -> None:
    """Print a report; with `out` also write it as `out`.md, and the results as `out`.json."""
    print(text)
    if out is not None:
        keep(results, text, out)


def keep(found: Any, text: str, out: Path) -> None:
    """Write a report as `out`.md, and the results as `out`.json, which git ignores under benchmarks/results."""
    out.parent.mkdir(parents=True, exist_ok=True)
    results = json.dumps(found, indent=1, default=_builtins)
    out.with_name(f"{out.name}.json").write_text(results + "\n", encoding="utf-8")
    out.with_name(f"{out.name}.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _builtins(value: Any) -> Any:
    import msgspec  # imported here: a machine without it can still write dicts and lists

    return msgspec.to_builtins(value)


@contextmanager
def plot(path: Path, columns: int, rows: int = 1, *, width: float = 4.5, height: float = 3.6) -> Iterator[list[Any]]:
    """Yield the axes of `columns` · `rows` panels, sized in inches, row by row; at the end the figure is saved to
    `path`, in 64 colours, which makes the file a quarter of the size."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    yield list(figure.subplots(rows, columns, squeeze=False).ravel())
    figure.savefig(path, dpi=100)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)
