"""Tests of uploads: arrays reach the device in alternating pinned chunks; what does not fit is rejected beforehand."""

from pathlib import Path

import numpy as np
import pytest

from gpu import GraphIndex, OutOfDeviceMemory
from gpu.cuda import upload
from gpu.cuda.upload import DeviceArrays, check_fits, device_arrays
from tests.cuda.recorder import RecordingDriver
from tests.gpu.datasets import clustered


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> GraphIndex:
    """Return an index, mapped from its files."""
    directory: Path = tmp_path_factory.mktemp("index") / "index"
    vectors = clustered(np.random.default_rng(0), 500, 20)
    GraphIndex.build(vectors, metric="l2", dtype="float16", degree=8, neighbor_codes=False).save(directory)
    return GraphIndex.load(directory)


def test_every_array_of_an_index_is_uploaded_unchanged(index: GraphIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "CHUNK_BYTES", 1000)
    driver = RecordingDriver()
    arrays = device_arrays(index.data)
    assert set(arrays) == {"rows", "graph", "seeds"}
    uploaded = DeviceArrays(driver, arrays)
    for name, array in arrays.items():
        assert uploaded.address[name] % 256 == 0
        assert driver.device(uploaded.address[name], array.dtype, array.size).tolist() == array.ravel().tolist()
    assert max(call[3] for call in driver.calls if call[0] == "copy_to_device") == 1000
    uploaded.close()
    uploaded.close()
    assert driver.memory_of == {}
    assert driver.streams == set()


def test_a_pinned_buffer_is_reused_only_after_its_copy_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "CHUNK_BYTES", 64)
    driver = RecordingDriver()
    DeviceArrays(driver, {"rows": np.arange(100, dtype=np.uint32)})
    work = [call[:2] for call in driver.calls if call[0] in ("synchronise", "copy_to_device")]
    copies = [call for call in work if call[0] == "copy_to_device"]
    assert len(copies) == 7
    assert len({stream for _, stream in copies}) == 2
    for place, (name, stream) in enumerate(work):
        if name == "copy_to_device":
            assert work[place - 1] == ("synchronise", stream)
    assert {call for call in work[-2:]} == {("synchronise", stream) for _, stream in copies}


def test_an_index_that_does_not_fit_is_rejected_with_needed_and_free_bytes_per_array() -> None:
    driver = RecordingDriver(total=(64 << 20) + 4096)
    check_fits(driver, {"rows": 2048, "graph": 2048})
    with pytest.raises(OutOfDeviceMemory) as caught:
        check_fits(driver, {"docs.rows": 10_000, "docs.graph": 3000, "docs.seeds": 100})
    message = str(caught.value)
    assert "13568 bytes are needed (docs.rows 10240, docs.graph 3072, docs.seeds 256), 4096 of" in message
    assert message.endswith("what would fit: docs.seeds, docs.graph")
    assert driver.calls == []


def test_a_failed_upload_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RecordingDriver()

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "copy_to_device", interrupted)
    with pytest.raises(KeyboardInterrupt):
        DeviceArrays(driver, {"rows": np.zeros(40, np.uint32)})
    assert driver.memory_of == {}
    assert driver.streams == set()


def test_a_step_copies_one_chunk_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "STEP_BYTES", 64)

    class BusyDriver(RecordingDriver):
        """A driver whose streams become idle when the test says so."""

        done = True

        def idle(self, stream: int) -> bool:
            return self.done

        def synchronise(self, stream: int) -> None:
            assert self.done, "this would wait"

    driver = BusyDriver()
    array = np.arange(100, dtype=np.uint32)
    uploaded = DeviceArrays(driver, {"rows": array}, in_steps=True)
    steps = 0
    while not uploaded.step():
        driver.done = not driver.done
        steps += 1
        assert len([call for call in driver.calls if call[0] == "copy_to_device"]) <= steps
    assert steps > 2 * 7, "every other call found the device busy"
    assert driver.device(uploaded.address["rows"], np.uint32, 100).tolist() == array.tolist()
    assert driver.streams == set()
    unfinished = DeviceArrays(driver, {"rows": array}, in_steps=True)
    unfinished.step()
    unfinished.close()
    uploaded.close()
    assert driver.memory_of == {}
    assert driver.streams == set()
