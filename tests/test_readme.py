"""The README is true: the files it names exist, its configuration loads, its commands are commands."""

import re
from pathlib import Path

import typer.main

from launchers.main import command_line
from runtime.node.config import load_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_and_folder_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"\b(?:runtime|gpu|ipc|launchers|dashboards|tests|benchmarks)/[\w./-]*", README))
    named = {name.rstrip("./") for name in named}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_its_configuration_loads_and_names_no_unknown_key(tmp_path: Path) -> None:
    text = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert text is not None
    path = tmp_path / "node.toml"
    path.write_text(re.sub(r"^# (?=\w+ = )", "", text[1], flags=re.MULTILINE))
    config = load_config(path)
    assert config.node.name == "my-node"
    assert config.http.api_keys_file.endswith("keys.txt")


def test_its_commands_exist() -> None:
    command = typer.main.get_command(command_line())
    known = set(command.commands)  # type: ignore[attr-defined]
    used = set(re.findall(r"^trinity (\w+)", README, re.MULTILINE))
    assert {"serve", "status", "stop", "index", "search"} <= used <= known
    groups = {name: set(group.commands) for name, group in command.commands.items() if hasattr(group, "commands")}  # type: ignore[attr-defined]
    for name, known in groups.items():
        assert set(re.findall(rf"^trinity {name} (\w+)", README, re.MULTILINE)) <= known, name


def test_the_runbooks_commands_exist() -> None:
    known = set(typer.main.get_command(command_line()).commands)  # type: ignore[attr-defined]
    text = (ROOT / "dashboards/RUNBOOK.md").read_text(encoding="utf-8")
    used = set(re.findall(r"`trinity (\w+)", text))
    assert {"status", "top", "restart"} <= used <= known


def test_its_benchmarks_exist() -> None:
    named = set(re.findall(r"python -m (benchmarks\.\w+)", README))
    paths = {name: ROOT / name.replace(".", "/") for name in named}
    assert [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())] == []


def test_every_trace_that_it_names_has_its_source_and_licence() -> None:
    traces = set(re.findall(r"--trace (\S+)", README))
    sources = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    assert traces
    for trace in traces:
        assert re.search(rf"`{re.escape(trace)}`.*https://.*CC BY", sources), trace
