"""`trinity calibrate`: what can go wrong with its output goes wrong before it measures for a minute."""

from pathlib import Path
from typing import Any

import pytest

from launchers import simulate_command
from runtime.simulator.service import ServiceTimes


def test_the_folder_of_measured_times_is_there_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "folder" / "times.json"
    (tmp_path / "node.toml").write_text("")

    def measured(config: Any, base: ServiceTimes, progress: Any) -> ServiceTimes:
        assert out.parent.is_dir()
        return base

    monkeypatch.setattr(simulate_command, "calibrate", measured)
    monkeypatch.setattr(simulate_command, "draw_roofline", lambda roofline, path: False)
    simulate_command.calibrate_machine(tmp_path / "node.toml", out)
    assert ServiceTimes.load(out) == ServiceTimes()
