"""The vLLM contract run: skipped with a one-line reason where vLLM is not installed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers import bootstrap, vllm_environment

CPU = "processor : 0\nflags : fpu sse4_2 avx2 fma\n"
MEMORY = "MemTotal: 16384000 kB\nMemAvailable: 9384000 kB\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the environment, in a folder that does not exist yet."""
    home = tmp_path / "cache" / "vllm"
    monkeypatch.setattr(vllm_environment, "HOME", home)
    return home


def obstacle(tmp_path: Path, cpu: str = CPU, memory: str = MEMORY) -> str:
    (tmp_path / "cpuinfo").write_text(cpu)
    (tmp_path / "meminfo").write_text(memory)
    return vllm_environment.unsupported_reason(tmp_path / "cpuinfo", tmp_path / "meminfo")


def made(home: Path, text: str) -> None:
    """Create the files of an installed environment."""
    library = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (home / "bin", library):
        folder.mkdir(parents=True)
    (home / "bin" / "python").touch()
    (home / "trinity-requirements.sha256").write_text(text)


def test_missing_requirements_of_the_machine_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert obstacle(tmp_path) == ""
    assert obstacle(tmp_path, cpu="flags : sse4_2 avx\n") == "the processor has no AVX2"
    assert "2.0 GiB of memory are free, 5 are needed" in obstacle(tmp_path, memory="MemAvailable: 2097152 kB\n")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "this is aarch64" in obstacle(tmp_path)


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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that the bootstrap would run."""
    run: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "install", lambda: None)
    monkeypatch.setattr(bootstrap, "run", lambda *command: run.append(tuple(map(str, command[1:]))))
    monkeypatch.setattr(vllm_environment, "unsupported_reason", lambda: "")
    monkeypatch.setenv("TRINITY_VLLM_VENV", "")
    monkeypatch.setenv("TRINITY_VLLM_PROMPTS", "5")
    return run


def test_the_contract_run_starts_where_vllm_is_installed(
    run: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_environment, "is_complete", lambda: True)
    bootstrap.main(["vllm-contract"])
    assert run == [bootstrap.CONTRACT]


def test_where_vllm_is_not_installed_one_line_is_printed_and_nothing_fails(
    run: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap.main(["vllm-contract"])
    assert run == []
    assert "skipped: no vLLM in" in capsys.readouterr().out.splitlines()[-1]


def test_the_bootstraps_vllm_part_uses_only_the_standard_library() -> None:
    command = [sys.executable, "-S", "-c", "import launchers.vllm_environment"]
    subprocess.run(command, cwd=bootstrap.ROOT, check=True, timeout=60)
