"""One page from sections of the check that ran one by one: `python -m benchmarks.gpu_check.merged --help`.

Each DIR holds the files SECTION-DIM.json of one run, with `dim`, `lines` and `error`; for a machine that is available
for minutes at a time. A measurement of a later directory replaces that of an earlier one; a section that failed counts
only where no run of it was complete. Lines "prefill …" and "decode …" of DIR/*.log are the speed of a larger model.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.report import table

MODEL = "larger model"
_LONGEST = 120

Lines = dict[tuple[str, str], str]  # by the line that it continues (begins with …) and its text: the value


def merged(directories: Sequence[Path]) -> dict[str, Lines]:
    """Return the lines of all sections by name."""
    by_section: dict[str, Lines] = {}
    failed: dict[str, Lines] = {}
    for directory in directories:
        for path in sorted(directory.glob("*.json")):
            read = json.loads(path.read_text())
            name = f"{path.stem.rpartition('-')[0]}, {read['dim']} dims"
            lines = _lines(read["lines"])
            if read["error"]:
                failed[name] = lines | {("", ""): f"FAILED: {read['error'].strip().splitlines()[-1]}"}
            else:
                by_section.setdefault(name, {}).update(lines)
        for path in sorted(directory.glob("*.log")):
            if model := dict(_model(path)):
                by_section[MODEL] = model
    return dict(sorted((failed | by_section).items()))


def _lines(lines: Sequence[Sequence[str]]) -> Lines:
    continued, values = "", {}
    for what, value in lines:
        continued = continued if what.startswith("…") else what
        values[continued, what] = value
    return values


def _model(path: Path) -> Iterator[tuple[tuple[str, str], str]]:
    for text in path.read_text(errors="replace").splitlines():
        what, _, value = text.strip().partition(": ")
        if what.startswith(("prefill ", "decode ")) and value:
            yield (what, what), value.partition("; first")[0]


def page(title: str, about: str, by_section: dict[str, Lines]) -> str:
    """Format the sections as Markdown."""
    rows = [
        (section, what, " ".join(value.split())[:_LONGEST])
        for section, lines in by_section.items()
        for (_, what), value in lines.items()
    ]
    return "\n".join([f"# {title}", "", about, "", *table(("section", "what", "value"), rows)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--title", required=True)
    parser.add_argument("--about", required=True, help="device, driver and versions of packages")
    options = parser.parse_args(arguments)
    options.out.write_text(page(options.title, options.about, merged(options.directories)))
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
