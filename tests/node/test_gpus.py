"""GPU discovery and metrics through NVML, and behaviour without NVML."""

from pathlib import Path

import pytest

from runtime.errors import InvalidRequest
from runtime.node.placement.gpus import Gpus, numa_node_of
from tests.node.fake_nvml import Card, FakeNvml


def test_without_nvml_there_are_no_gpus_and_a_gauge_has_the_reason() -> None:
    gpus = Gpus(FakeNvml([], broken="Driver Not Loaded"))
    assert gpus.all() == []
    assert gpus.driver() == ""
    (up,) = gpus.families()
    assert up.samples[0].value == 0.0
    assert "Driver Not Loaded" in up.samples[0].labels["reason"]


def test_gpus_of_this_machine_are_listed_with_or_without_a_driver() -> None:
    gpus = Gpus()
    families = {family.name: family for family in gpus.families()}
    assert (families["trinity_nvml_up"].samples[0].value == 1.0) == (gpus.missing == "")


def test_every_gpu_is_reported_with_numa_node_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "numa_node").write_text("1\n")
    gpus = Gpus(FakeNvml([Card("GPU-aaaaaaaa"), Card("GPU-bbbbbbbb", bus="00000000:2A:00.0")]), tmp_path)
    first, second = gpus.all()
    assert (first.index, first.pci_bus, first.numa_node) == ("0", "0000:17:00.0", 1)
    assert (second.pci_bus, second.numa_node) == ("0000:2a:00.0", None)
    families = {family.name: family for family in gpus.families()}
    assert families["trinity_nvml_up"].samples[0].value == 1.0
    used = {sample.labels["gpu"]: sample.value for sample in families["trinity_gpu_memory_used_bytes"].samples}
    assert used == {"0": 8 << 30, "1": 8 << 30}
    assert families["trinity_gpu_memory_busy_ratio"].samples[0].value == 0.25
    assert families["trinity_gpu_power_watts"].samples[0].value == 350.0


def test_a_worker_that_does_not_fit_into_a_gpus_free_memory_is_refused() -> None:
    gpus = Gpus(FakeNvml([Card("GPU-aaaaaaaa", total=80 << 30, used=70 << 30)]))
    gpus.check_free("GPU-aaaaaaaa", 10 << 30, "decode-1")
    gpus.check_free("SIM-0", 1 << 40, "decode-1")
    with pytest.raises(InvalidRequest, match=r"GPU 0 \(GPU-aaaaaaaa\) has 10.0 GiB free, but decode-1 needs 12.0 GiB"):
        gpus.check_free("GPU-aaaaaaaa", 12 << 30, "decode-1")


def test_a_gpu_that_has_failed_is_not_checked_and_hides_no_other() -> None:
    cards = [Card("GPU-aaaaaaaa"), Card("GPU-bbbbbbbb", total=80 << 30, used=70 << 30)]
    gpus = Gpus(FakeNvml(cards))
    cards[0].failed = True
    gpus.check_free("GPU-aaaaaaaa", 1 << 40, "decode-1")
    with pytest.raises(InvalidRequest, match="GPU 1"):
        gpus.check_free("GPU-bbbbbbbb", 12 << 30, "decode-1")


def test_an_unsupported_gpu_metric_is_omitted() -> None:
    gpus = Gpus(FakeNvml([Card("GPU-aaaaaaaa", power_mw=None)]))
    names = {family.name for family in gpus.families()}
    assert "trinity_gpu_power_watts" not in names
    assert "trinity_gpu_busy_ratio" in names


def test_mig_instances_follow_their_gpu() -> None:
    gpus = Gpus(FakeNvml([Card("GPU-aaaaaaaa", instances=["MIG-11111111", "MIG-22222222"])])).all()
    assert [(gpu.index, gpu.uuid, gpu.is_mig) for gpu in gpus] == [
        ("0", "GPU-aaaaaaaa", False),
        ("0:0", "MIG-11111111", True),
        ("0:1", "MIG-22222222", True),
    ]
    assert {gpu.pci_bus for gpu in gpus} == {"0000:17:00.0"}


@pytest.mark.parametrize("name", ["0", "cuda:0", "GPU-aaaaaaaa-1", "GPU-aaaaaaaa"])
def test_a_gpu_is_found_by_index_uuid_or_uuid_prefix(name: str) -> None:
    (gpu,) = Gpus(FakeNvml([Card("GPU-aaaaaaaa-1")])).all()
    assert gpu.matches(name)
    assert not gpu.matches("GPU-a")
    assert not gpu.matches("1")


@pytest.mark.parametrize(("text", "node"), [("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_an_unknown_numa_node_is_not_guessed(tmp_path: Path, text: str | None, node: int | None) -> None:
    if text is not None:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "numa_node").write_text(text)
    assert numa_node_of("x", tmp_path) == node
