"""`serve --dry-run` and `doctor` refuse what `serve` refuses, and leave no files."""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from launchers.main import command_line
from runtime.errors import EXIT_CONFIG, TrinityError
from runtime.retrieval.collections import bulk_load
from runtime.serving.model.smollm import CONFIG

OPENAI = {"engine": "openai", "name": "big", "url": "http://127.0.0.1:9/v1"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a context over the model's": (
        {"model": {"name": "smollm2-135m-instruct", "context_tokens": 100_000}},
        "model.context_tokens = 100000: ",
    ),
    "a model without weights": ({"model": {"name": "./model", "context_tokens": 64}}, ": no tokenizer.json in "),
    "a reranker that there is not": (
        {"rerank": {"model": "models/none"}},
        "rerank.model: there is no directory of a model at ",
    ),
    "a reranker's key that there is not": (
        {"rerank": {"model": "m", "url": "http://127.0.0.1:1/v1", "key_file": "none"}},
        "the reranker's key cannot be read from ",
    ),
    "a folder that is no collection": (
        {"collections": [{"name": "notes", "path": "model"}]},
        "collection notes: ",
    ),
    "a run directory under a file": ({"node": {"run_dir": "file/run"}}, "node.run_dir: cannot use "),
    "a run directory with somebody's files": ({"node": {"run_dir": "shared"}}, "which nodes remove, beside "),
    "an answer cache without a model": (
        {"answer_cache": {"threshold": 0.97}},
        "answer_cache.threshold = 0.97: answers are those of a model",
    ),
    "a log directory under a file": ({"log": {"directory": "file/logs"}}, "cannot create log files there: "),
    "a log directory that is a file": ({"log": {"directory": "file"}}, "cannot create log files there: "),
    "a log directory under /proc": ({"log": {"directory": "/proc/x"}}, "log.directory = '/proc/x': cannot create log"),
    "stores in a file": ({"stores": {"path": "file"}}, "/file': cannot create files there: Not a directory"),
    "stores under /proc": ({"stores": {"path": "/proc/x"}}, "stores.path = '/proc/x': cannot create files there: "),
    "a disk tier in a file": (
        {"kv": {"disk_mib": 64, "disk_path": "file"}, "model": {"name": "smollm2-135m-instruct"}},
        "/file': cannot create files there: Not a directory",
    ),
}


def ask(folder: Path, sections: dict[str, Any], *command: str) -> Result:
    """Run a command on the node of these sections, with a collection `docs`."""
    if not (folder / "docs").exists():
        bulk_load.build(np.eye(8, dtype=np.float32), folder / "docs", degree=2)
    (folder / "file").touch()
    (folder / "model").mkdir(exist_ok=True)
    (folder / "shared" / "kv").mkdir(parents=True, exist_ok=True)
    (folder / "shared" / "app.py").touch()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    sections = {"http": {"port": 0}, "collections": [{"name": "docs", "path": "docs"}]} | sections
    lines = [f"{name}.{key} = {json.dumps(value)}" for name, section in sections.items() if name != "collections"
             for key, value in section.items()]  # fmt: skip
    for collection in sections["collections"]:
        lines += ["[[collections]]", *(f"{key} = {json.dumps(value)}" for key, value in collection.items())]
    (folder / "node.toml").write_text("\n".join(lines))
    return CliRunner().invoke(command_line(), [*command, "--config", str(folder / "node.toml")])


@pytest.mark.parametrize("case", REFUSED)
def test_dry_run_and_doctor_refuse_what_a_start_refuses(case: str, tmp_path: Path) -> None:
    sections, says = REFUSED[case]
    dry = ask(tmp_path, sections, "serve", "--dry-run")
    assert isinstance(dry.exception, TrinityError), dry.output
    assert says in dry.exception.message
    assert dry.exception.exit_code == EXIT_CONFIG
    doctor = ask(tmp_path, sections, "doctor")
    assert doctor.exit_code == 1
    assert says in doctor.output


def test_a_valid_node_passes_and_no_directory_is_left(tmp_path: Path) -> None:
    dry = ask(tmp_path, {"log": {"directory": "new/logs"}, "stores": {"path": "new/stores"}}, "serve", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "pool-0" in dry.output
    assert "checksums" not in dry.output
    assert not (tmp_path / "new").exists()


def test_checks_make_no_directory_that_a_node_which_starts_meanwhile_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    mkdir = os.mkdir

    def record(path: Path, *mode: int) -> None:
        made.append(Path(path))
        mkdir(path, *mode)

    sections = {"node": {"run_dir": "nodes/run"}, "log": {"directory": "logs"}, "stores": {"path": "stores"}}
    assert ask(tmp_path, sections, "serve", "--dry-run").exit_code == 0
    monkeypatch.setattr(os, "mkdir", record)
    assert ask(tmp_path, sections, "serve", "--dry-run").exit_code == 0
    assert made
    assert not {tmp_path / name for name in ("nodes", "nodes/run", "logs", "stores")} & set(made)


def test_a_full_disk_does_not_keep_a_node_from_its_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dir: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    (tmp_path / "stores").mkdir()
    assert ask(tmp_path, {"stores": {"path": "stores"}}, "serve", "--dry-run").exit_code == 0


@pytest.mark.parametrize("command", [("serve", "--dry-run"), ("doctor",)])
def test_a_dry_run_reports_checksums_that_only_a_start_verifies(command: tuple[str, ...], tmp_path: Path) -> None:
    said = ask(tmp_path, {"collections": [{"name": "docs", "path": "docs", "verify": "start"}]}, *command)
    assert "collection docs: its checksums were not compared; the start compares them" in said.output
