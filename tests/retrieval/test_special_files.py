"""A file that a node or a command opens may have been replaced: by a pipe, a device without end, or one that is too
large. Each is refused, with its name, before it is read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import CollectionError, ConfigError, ModelError, NoRoom, TrinityError
from runtime.files import check_regular, open_regular, read_regular
from runtime.node.api_keys import read_api_keys, read_key
from runtime.node.config_file import load_config
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.serving.model.model_info import read_config
from runtime.serving.model.tokenizer import Tokenizer

Replace = Callable[[Path], None]
VECTORS = np.random.default_rng(5).standard_normal((80, 4), np.float32)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/full")


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 42)


REPLACEMENTS = pytest.mark.parametrize("replace", [pipe, endless, sparse])


@REPLACEMENTS
def test_only_regular_files_of_a_limited_size_are_opened(tmp_path: Path, replace: Replace) -> None:
    path = tmp_path / "file"
    replace(path)
    reason: dict[Replace, str] = {
        pipe: "it is a pipe, not",
        endless: "it is a device, not",
        sparse: "4,398,046,511,104 bytes, the limit",
    }
    for act in (
        lambda: open_regular(path, max_bytes=8),
        lambda: open_regular(path, os.O_RDWR | os.O_CREAT, max_bytes=8),
        lambda: read_regular(path, 8),
        lambda: check_regular(path, 8),
    ):
        with pytest.raises(OSError, match=reason[replace]):
            act()


def test_a_file_of_proc_is_read_up_to_the_limit() -> None:
    with pytest.raises(OSError, match="more than 8 bytes, the limit is 8"):
        read_regular("/proc/self/status", 8)


def collection(directory: Path) -> Path:
    """A collection with a sealed segment, a deleted row and a growing one."""
    bulk_load.create(directory, 4)
    with CollectionWriter(directory, background=False) as writer:
        writer.upsert(
            [UpsertDocument(f"d{row}", "text", vector=VECTORS[row], attributes={"n": row}) for row in range(80)]
        )
        writer.flush()
        writer.delete(["d3"])
        writer.flush()
        writer.upsert([UpsertDocument("last", "text", vector=VECTORS[0])])
        writer.compact()
        writer.delete(["d4"])
        writer.upsert([UpsertDocument("last", "text", vector=VECTORS[0])])
        writer.flush()
        writer.upsert([UpsertDocument("last", "text", vector=VECTORS[0])])
    return directory


def files_of(directory: Path) -> list[Path]:
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


@REPLACEMENTS
def test_a_collection_with_a_replaced_file_is_refused(tmp_path: Path, replace: Replace) -> None:
    whole = collection(tmp_path / "whole")
    for name in files_of(whole):
        if name.name == "writer.lock":  # its content is not used
            continue
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        replace(copy / name)
        with pytest.raises(TrinityError):
            CollectionReader.verify(copy)
        if name.parts[0] != "segments":
            for open_collection in (CollectionReader, CollectionWriter):
                with pytest.raises(CollectionError) as refused:
                    open_collection(copy).close()
                assert not isinstance(refused.value, NoRoom)  # the disk is not full
        shutil.rmtree(copy)


def test_a_lock_that_is_a_pipe_or_a_device_is_refused(tmp_path: Path) -> None:
    directory = collection(tmp_path / "live")
    for replace in (pipe, endless):
        replace(directory / "writer.lock")
        with pytest.raises(TrinityError, match=r"writer\.lock cannot be locked: it is"):
            CollectionWriter(directory)


@REPLACEMENTS
def test_configurations_and_keys_are_regular_files(tmp_path: Path, replace: Replace) -> None:
    path = tmp_path / "file"
    replace(path)
    with pytest.raises(ConfigError, match="cannot read the configuration: it "):
        load_config(path)
    with pytest.raises(ConfigError, match=r"key cannot be read from .*: it "):
        read_key(str(path), "the embedder's")
    config = tmp_path / "node.toml"
    config.write_text(f'[http]\nport = 0\napi_keys_file = "{path}"\n')
    with pytest.raises(ConfigError, match=r"cannot read .*: it "):
        read_api_keys(load_config(config))


@REPLACEMENTS
def test_files_of_models_are_regular(tmp_path: Path, replace: Replace) -> None:
    for name in ("config.json", "tokenizer.json"):
        replace(tmp_path / name)
    with pytest.raises(ModelError, match=r"config\.json: it "):
        read_config(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json.*it "):
        Tokenizer.load(tmp_path)
