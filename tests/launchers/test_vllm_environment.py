"""vLLM's environment: complete for its requirements and its Python, made again for others."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers import bootstrap, vllm_environment


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the environment, in a folder that does not exist yet."""
    home = tmp_path / "cache" / "vllm"
    monkeypatch.setattr(vllm_environment, "HOME", home)
    return home


def made(home: Path, text: str) -> None:
    """Create the files of an installed environment."""
    library = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (home / "bin", library):
        folder.mkdir(parents=True)
    (home / "bin" / "python").touch()
    (home / "trinity-requirements.sha256").write_text(text)


def test_an_environment_with_other_requirements_or_python_is_recreated(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not vllm_environment.is_complete()
    made(home, "others")
    assert not vllm_environment.is_complete()
    monkeypatch.setattr("subprocess.call", lambda *command, **options: 0)
    monkeypatch.setattr("venv.create", lambda *path, **options: None)
    assert vllm_environment.create(lambda python: ()) == 0
    assert vllm_environment.is_complete()
    monkeypatch.setattr("sys.version_info", SimpleNamespace(major=3, minor=99))
    assert not vllm_environment.is_complete()


def test_an_installation_that_fails_leaves_no_stamp(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(home, "others")
    monkeypatch.setattr("subprocess.call", lambda *command, **options: 1)
    monkeypatch.setattr("venv.create", lambda *path, **options: None)
    assert vllm_environment.create(lambda python: ()) == 1
    assert not vllm_environment.is_complete()


def test_tests_of_real_vllm_are_skipped_where_its_installation_has_not_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_VLLM_VENV", str(home))
    made(home, "others")
    module = runpy.run_path(str(bootstrap.ROOT / "tests" / "engines" / "test_real_vllm.py"))
    assert [mark.args[0] for mark in module["pytestmark"] if mark.kwargs.get("reason", "").startswith("no vLLM")] == [
        True
    ]


def test_the_bootstraps_vllm_part_uses_only_the_standard_library() -> None:
    command = [sys.executable, "-S", "-c", "import launchers.vllm_environment"]
    subprocess.run(command, cwd=bootstrap.ROOT, check=True, timeout=60)
