"""Tests that no decision depends on the wall clock, which can jump: its readers are listed here with reasons."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WALL_CLOCK = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
ALLOWED = {
    "runtime/serving/http/app.py": "when the node started, as its models show, and the clock of responses",
    "runtime/serving/http/routes/completions.py": "the time that an answer shows as `created`",
    "runtime/engines/vllm/plugins/trinity_kv_files.py": "how old files are, whose dates are the wall clock's",
    "runtime/serving/kv/file_tier.py": "how long files are held, whose dates are the wall clock's",
    "runtime/serving/frontend/spans.py": "when a span began, for who reads it among those of others",
    "runtime/retrieval/stores/service.py": "when stores and files were made and expire, which outlasts a restart",
    "runtime/retrieval/stores/responses.py": "when responses were made and expire, which outlasts a restart",
}


NAMED = re.compile(rf"\b({'|'.join(sorted({name for names in WALL_CLOCK.values() for name in names}))})\b")


def wall_clock_reads(source: str) -> Iterator[int]:
    """Return the lines that name a wall clock function."""
    if not NAMED.search(source):
        return  # it need not be parsed
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr in WALL_CLOCK.get(owner, ()):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for name in node.names if name.name in WALL_CLOCK["time"])


def test_only_listed_modules_read_the_wall_clock() -> None:
    packages = ("runtime", "ipc", "gpu", "launchers", "dashboards")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 150
    found = {str(path.relative_to(ROOT)) for path in paths if any(wall_clock_reads(path.read_text(encoding="utf-8")))}
    assert found == set(ALLOWED)


# On a module, a class or a path to one: `setattr(server, "RENEW_NS", 0)`.
PATCHED_TIME = re.compile(r"""setattr\(\s*[^()]*["'][\w.]*?_?[A-Z]\w*_(?:S|MS|US|NS)["']""")


def test_no_test_patches_a_time_constant_instead_of_passing_a_timing_or_clock() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert len(paths) > 150
    assert [path.name for path in paths if PATCHED_TIME.search(path.read_text(encoding="utf-8"))] == []
