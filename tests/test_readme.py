"""Tests of README and docs: files and links exist, configurations load, commands parse."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from launchers.commands.config import reference
from launchers.main import command_line
from runtime.node.config_file import load_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
EVERYTHING = "\n".join(TEXTS.values())


def test_readme_is_short_and_links_every_page() -> None:
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= 150
    for page in TEXTS:
        assert page == "README.md" or f"({page})" in readme, page


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_and_folder_named_in_a_page_exists(page: str) -> None:
    named = set(
        re.findall(r"(?<![\w/.-])(?:runtime|gpu|ipc|launchers|dashboards|tests|benchmarks|docs)/[\w./-]*", TEXTS[page])
    )
    named = {name.rstrip("./") for name in named}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_has_an_existing_file_and_heading(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if re.match(r"https?:", target):
            continue
        path, _, heading = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if heading:
            assert heading in _anchors(file.read_text(encoding="utf-8")), target


def _anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_names_in_the_architecture_page_occur_in_the_files_it_gives() -> None:
    table = TEXTS["docs/architecture.md"].partition("## Where to look")[2].partition("## ")[0]
    rows = [row for row in table.splitlines() if "](" in row and row.startswith("|")]
    assert len(rows) >= 6
    for row in rows:
        sources = [(ROOT / "docs" / path).read_text(encoding="utf-8") for path in re.findall(r"\]\(([^)]+)\)", row)]
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", row):
            assert any(re.search(rf"\b{name}\b", source) for source in sources), name


def test_the_configuration_page_is_the_output_of_trinity_config() -> None:
    assert TEXTS["docs/configuration.md"] == reference(), "trinity config > docs/configuration.md"


def test_the_configuration_page_gives_no_default_that_its_key_refuses() -> None:
    for text in TEXTS["docs/configuration.md"].split("\n## ")[1:]:
        for key, default, values in re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*) \|$", text, re.MULTILINE):
            least = re.match(r"(?:integer|number) (from|above) ([\d.]+)", values)
            if least and default != "{}":
                assert float(default) > float(least[2]) or (least[1], default) == ("from", least[2]), key


def test_configurations_load_without_unknown_keys(tmp_path: Path) -> None:
    path, loaded = tmp_path / "node.toml", []
    for text in re.findall(r"```toml\n(.*?)```", EVERYTHING, re.DOTALL):
        path.write_text(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
        loaded.append(load_config(path))
    assert any(config.node.name == "my-node" and config.http.api_keys_file.endswith("keys.txt") for config in loaded)


def test_commands_exist() -> None:
    command = typer.main.get_command(command_line())
    known = set(command.commands)  # type: ignore[attr-defined]
    used = set(re.findall(r"^trinity (\w+)", EVERYTHING, re.MULTILINE)) | set(re.findall(r"`trinity (\w+)", EVERYTHING))
    assert {"serve", "status", "stop", "index", "search", "top", "restart"} <= used <= known
    groups = {name: set(group.commands) for name, group in command.commands.items() if hasattr(group, "commands")}  # type: ignore[attr-defined]
    for name, known in groups.items():
        assert set(re.findall(rf"^trinity {name} (\w+)", EVERYTHING, re.MULTILINE)) <= known, name


def documented(program: str) -> list[list[str]]:
    """Return a program's command lines in the pages' shell blocks, as words; `...` is a placeholder."""
    found: list[list[str]] = []
    for block in re.findall(r"```sh\n(.*?)```", EVERYTHING, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(rf"(?:.*\| *)?{program}\b", line):
                continue
            words = shlex.shlex(line, posix=True, punctuation_chars=";|&>")
            words.whitespace_split = True
            parts: list[list[str]] = [[]]
            for word in words:
                if set(word) <= set(";|&>"):
                    parts.append([])
                else:
                    parts[-1].append(word)
            found += [part for part in parts if part[: len(program.split())] == program.split()]
    return found


def test_documented_commands_of_trinity_are_valid() -> None:
    """Options and arguments exist."""
    commands = documented("trinity")
    assert len(commands) > 50
    for _, *words in commands:
        command: Any = typer.main.get_command(command_line())
        while hasattr(command, "commands"):
            name, *words = words
            command = command.commands[name]
        command.make_context(command.name, words)


def test_documented_benchmark_commands_are_valid() -> None:
    named = re.findall(r"python3? -m (benchmarks\.\w+)([^`#\n]*)", EVERYTHING)
    assert len(named) > 20
    for name, options in named:
        source = _source(ROOT / name.replace(".", "/"))
        unknown = [option for option in re.findall(r"--[\w-]+", options) if f'"{option}"' not in source]
        assert (bool(source), unknown) == (True, []), name


def _source(module: Path) -> str:
    """Return the source of a benchmark and of its imports, or "" if it does not exist."""
    files = sorted(module.glob("*.py")) if module.is_dir() else [module.with_suffix(".py")]
    own = "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    others = {ROOT / name.replace(".", "/") for name in re.findall(r"^from (benchmarks\.[\w.]+) import", own, re.M)}
    return own + "".join(
        file.read_text(encoding="utf-8") for other in others if (file := other.with_suffix(".py")).exists()
    )


def test_every_named_trace_has_its_source_and_licence() -> None:
    traces = set(re.findall(r"--trace ([\w./-]+\.(?:csv|jsonl\S*))", EVERYTHING))
    assert traces
    for trace in traces:
        assert re.search(rf"`{re.escape(trace)}`.*https://.*(CC BY|Apache-2.0|MIT)", TEXTS["docs/simulation.md"]), trace
