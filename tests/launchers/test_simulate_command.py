"""`trinity simulate` describes its counts; `trinity calibrate` checks its output path before measuring."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launchers.commands import simulate
from launchers.main import command_line
from runtime.errors import ConfigError, UsageError
from runtime.simulator.times.service import ServiceTimes


def test_the_output_folder_is_created_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "folder" / "times.json"
    (tmp_path / "node.toml").write_text("")

    def measured(config: Any, base: ServiceTimes, progress: Any) -> ServiceTimes:
        assert out.parent.is_dir()
        return base

    monkeypatch.setattr("runtime.simulator.times.calibrate.calibrate", measured)
    simulate.calibrate_machine(tmp_path / "node.toml", out)
    assert ServiceTimes.load(out) == ServiceTimes()


def test_an_output_folder_that_cannot_be_created_is_refused_before_anything_is_simulated(
    simulated: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.simulator.node.simulate", lambda *setup: pytest.fail("simulated"))
    for taken in ("node.toml", "node.toml/below"):
        with pytest.raises(ConfigError, match=f"^--out: {tmp_path / taken} cannot be created: "):
            simulated("", "--out", str(tmp_path / taken))
    (tmp_path / "new").touch()
    with pytest.raises(ConfigError, match=f"^--out: {tmp_path / 'new'} cannot be created: File exists"):
        simulate.calibrate_machine(tmp_path / "node.toml", tmp_path / "new" / "times.json")


@pytest.mark.parametrize("option", ["--ttft", "--tpot"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_an_slo_that_is_no_time_is_refused(simulated: Callable[..., str], option: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is {value}; it must be a number above 0"):
        simulated("", option, value)


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., str]:
    """Return the command's output for a small trace on a node with the given SLOs."""

    def run(promises: str, *options: str) -> str:
        (tmp_path / "node.toml").write_text(promises)
        rows = [f"2023-11-16 18:00:{second:02}.0000000,500,20" for second in range(0, 40, 2)]
        (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
        words = ["simulate", "--config", str(tmp_path / "node.toml"), "--trace", str(tmp_path / "trace.csv")]
        shown = CliRunner().invoke(command_line(), [*words, *options], env={"COLUMNS": "200"}, catch_exceptions=False)
        return " ".join(shown.stdout.split())

    return run


def test_the_files_slos_are_used_unless_overridden(simulated: Callable[..., str]) -> None:
    strict = "[slo]\nttft_s = 1e-6\ntpot_s = 0.5"
    told = simulated(strict)
    assert "first token within 1e-06 s, 500 ms per later token" in told
    assert "TTFT (s) │ 0.0%" in told
    told = simulated(strict, "--ttft", "2")
    assert "first token within 2 s, 500 ms per later token" in told
    assert "TTFT (s) │ 100.0%" in told


def test_hand_overs_through_the_pool_are_said_to_be_simulated_from_memory_to_memory(
    simulated: Callable[..., str],
) -> None:
    assert 'every hand-over is simulated as "p2p"' in simulated('[handover]\nmode = "pool"')


def test_load_and_busy_time_are_reported_separately(simulated: Callable[..., str]) -> None:
    told = simulated("")
    assert re.search(r"\w+ is the bottleneck: its capacity with full batches is [\d.]+ requests/s", told)
    assert re.search(r"busy, with the actual batches: .* decode \d+% of the time with \d+% of its slots", told)


def test_times_and_models_on_several_gpus_are_options(simulated: Callable[..., str]) -> None:
    def tpot_ms(*options: str) -> float:
        shown = simulated("", "--probe-every", "0", *options)
        assert "service times: H100 data sheet" in shown
        found = re.search(r"TPOT \(ms\) │ [\d.]+% │ ([\d.]+)", shown)
        assert found, shown
        return float(found[1])

    sheet = ("--times", "h100-8b")
    dense, mixture, parallel = (
        tpot_ms(*sheet),
        tpot_ms(*sheet, "--experts", "64"),
        tpot_ms(*sheet, "--tensor-parallel", "2"),
    )
    assert mixture - dense == pytest.approx(0.093, abs=0.011), "64 experts of an eighth of the GPUs"
    assert parallel == pytest.approx(dense / 2, rel=0.02)
    assert "service times: defaults: measured on an H200" in simulated("")
