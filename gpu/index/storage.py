"""Index files: a directory of `.npy` arrays and a `meta.json` with their names, sizes and checksums.

    meta.json      {"format": "trinity-index", "version": 6, "metric", "dtype", "dim", "size", "degree",
                    "scale", "code_bits", "files": {"codes.npy": {"bytes", "sha256"}, …}}
    codes.npy      encoded vectors as the search reads them      (see `gpu.index.rows`)
    centre.npy     float32 [d]
    graph.npy      uint32 [N, degree]
    seeds.npy      uint32 [S]
    ids.npy        int64 [N]                                     (only if the caller gave ids)
    neighbors.npy  uint8 [N, block_bytes]                        (see `gpu.index.data`; only with neighbor_codes)
    entry.npy      uint8 [1, block_bytes], the seeds' block       (with neighbors.npy)
    rotation.npy   float32 [4, d padded to 64]                   (with neighbors.npy)
    scan.npy       uint8 [1, block_bytes], the block of all rows (with neighbors.npy)

Versions 2 (no codes), 3 (codes of one bit, without the field), 4 (without scan.npy) and 5 (with sketches of the rows,
which are not read) can still be read.

Writes are atomic: a temporary directory beside the target is renamed. Nothing is executed or unpickled.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from gpu.errors import IndexFormatError
from gpu.index.data import MAX_CODE_BITS, ROUNDS, IndexData, NeighborCodes, block_bytes, code_dims
from gpu.index.rows import DTYPES, MAX_DIM, METRICS, Rows, code_shape

FORMAT, VERSION, OLDEST_VERSION = "trinity-index", 6, 2
MAX_DEGREE = 512
MAX_SEEDS = 4096  # every slot of a batch has room for them
_SKETCH_FILES = {"sketch.npy", "projection.npy"}  # of earlier versions
CODE_FILES = ("neighbors.npy", "entry.npy", "rotation.npy", "scan.npy")  # of neighbour codes
_META = "meta.json"
_META_LIMIT = 1 << 20
_CHECKED_ROWS = 1 << 16
_ALIGNMENT = 64  # of the data after numpy's header


def save(data: IndexData, directory: Path) -> None:
    """Write an index to a directory atomically. Raises IndexFormatError if it exists and is not an index."""
    if directory.exists() and (
        not directory.is_dir() or (any(directory.iterdir()) and not (directory / _META).exists())
    ):
        raise IndexFormatError(f"{directory} exists and is not an index; it will not be replaced")
    arrays = {
        "codes.npy": data.rows.codes,
        "centre.npy": data.rows.centre,
        "graph.npy": data.graph,
        "seeds.npy": data.seeds,
    }
    if data.ids is not None:
        arrays["ids.npy"] = data.ids
    if data.codes is not None:
        codes = (data.codes.blocks, data.codes.entry, data.codes.signs, data.codes.scan)
        arrays |= {name: array for name, array in zip(CODE_FILES, codes, strict=True) if array is not None}
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.parent / f".{directory.name}.{uuid4().hex}"
    fresh.mkdir()
    try:
        for name, array in arrays.items():
            np.save(fresh / name, array, allow_pickle=False)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "metric": data.rows.metric,
            "dtype": data.rows.dtype,
            "dim": data.rows.dim,
            "size": len(data.graph),
            "degree": data.graph.shape[1],
            "scale": data.rows.scale,
            "code_bits": 0 if data.codes is None else data.codes.bits,
            "files": {
                name: {"bytes": (fresh / name).stat().st_size, "sha256": _sha256(fresh / name)} for name in arrays
            },
        }
        (fresh / _META).write_text(json.dumps(meta, indent=1) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(fresh, directory)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(fresh)


def load(directory: Path) -> IndexData:
    """Memory-map an index; check sizes and shapes but not contents. Raises IndexFormatError."""
    meta = _read_meta(directory)
    size, degree, dim, dtype = meta["size"], meta["degree"], meta["dim"], meta["dtype"]
    files = meta["files"]
    shapes: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
        "codes.npy": code_shape(size, dim, dtype),
        "centre.npy": ((dim,), np.float32),
        "graph.npy": ((size, degree), np.uint32),
        "seeds.npy": ((-1,), np.uint32),
    }
    if "ids.npy" in files:
        shapes["ids.npy"] = ((size,), np.int64)
    if "neighbors.npy" in files:
        shapes["neighbors.npy"] = ((size, block_bytes(dim, degree, meta["code_bits"])), np.uint8)
        shapes["entry.npy"] = ((1, -1), np.uint8)
        shapes["rotation.npy"] = ((ROUNDS, code_dims(dim)), np.float32)
        if "scan.npy" in files:
            shapes["scan.npy"] = ((1, block_bytes(dim, size, meta["code_bits"])), np.uint8)
    if set(files) - _SKETCH_FILES != set(shapes):
        raise IndexFormatError(f"{directory / _META} lists {sorted(files)}; an {dtype} index has {sorted(shapes)}")
    arrays = {name: _map(directory / name, files[name], *shape) for name, shape in shapes.items()}
    seeds = arrays["seeds.npy"]
    if not 1 <= len(seeds) <= min(size, MAX_SEEDS) or int(seeds.max()) >= size:
        raise IndexFormatError(f"{directory / 'seeds.npy'} is damaged: {len(seeds)} seeds for {size} vectors")
    centre = np.array(arrays["centre.npy"])
    rows = Rows(meta["metric"], dtype, dim, arrays["codes.npy"], centre, meta["scale"])
    codes = _codes(arrays, dim, meta["code_bits"], directory)
    return IndexData(rows, arrays["graph.npy"], np.array(seeds), arrays.get("ids.npy"), codes)


def _codes(arrays: dict[str, npt.NDArray[Any]], dim: int, bits: int, directory: Path) -> NeighborCodes | None:
    if "neighbors.npy" not in arrays:
        return None
    entry, signs = arrays["entry.npy"], np.array(arrays["rotation.npy"])
    expected = block_bytes(dim, len(arrays["seeds.npy"]), bits)
    if entry.shape[1] != expected:
        raise IndexFormatError(f"{directory / 'entry.npy'} is damaged: {entry.shape[1]} bytes instead of {expected}")
    if not np.isfinite(signs).all():
        raise IndexFormatError(f"{directory / 'rotation.npy'} is damaged: it holds values that are not finite")
    return NeighborCodes(arrays["neighbors.npy"], entry, signs, bits, arrays.get("scan.npy"))


def verify(directory: Path) -> None:
    """Check every file against its checksum, and the graph's edges. Raises IndexFormatError with the file's name."""
    meta = _read_meta(directory)
    data = load(directory)
    for name, facts in meta["files"].items():
        if _sha256(directory / name) != facts["sha256"]:
            raise IndexFormatError(f"{directory / name} was altered: its SHA-256 is not the one in {_META}")
    check_graph(data, directory)


def files(directory: Path) -> dict[str, tuple[int, str]]:
    """Return sizes in bytes and SHA-256 (hex) of an index's files by name. Raises IndexFormatError."""
    return {name: (facts["bytes"], facts["sha256"]) for name, facts in _read_meta(directory)["files"].items()}


def check_graph(data: IndexData, directory: Path) -> None:
    """Raise IndexFormatError if an edge points outside the index: compiled code does not check bounds.

    Reads the whole graph once.
    """
    for begin in range(0, len(data.graph), _CHECKED_ROWS):
        most = int(data.graph[begin : begin + _CHECKED_ROWS].max())
        if most >= len(data.graph):
            path = directory / "graph.npy"
            raise IndexFormatError(f"{path} is damaged: it points to row {most} of {len(data.graph)}")


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / _META
    try:
        _regular_size(path)
        with open(path, "rb") as file:
            text = file.read(_META_LIMIT + 1)
        meta = json.loads(text) if len(text) <= _META_LIMIT else None
    except OSError as error:
        raise IndexFormatError(f"{directory} is not an index: {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise IndexFormatError(f"{path} is damaged: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise IndexFormatError(f"{path} does not describe a {FORMAT}")
    if meta.get("version") not in range(OLDEST_VERSION, VERSION + 1):
        raise IndexFormatError(
            f"{path} has version {meta.get('version')}; this program reads versions {OLDEST_VERSION} to {VERSION}: "
            "build it anew"
        )
    if meta.setdefault("code_bits", 1) in (3, 4):
        raise IndexFormatError(
            f"{path} has neighbour codes of {meta['code_bits']} bits, which no longer exist: build it anew"
        )
    if meta.get("dtype") == "int8":
        raise IndexFormatError(
            f"{path} has int8 rows, which no longer exist: build it anew, with float16 for small rows"
        )
    limits = {
        "size": (1, (1 << 31) - 1),
        "degree": (2, MAX_DEGREE),
        "dim": (1, MAX_DIM),
        "code_bits": (0, MAX_CODE_BITS),
    }
    for name, (least, most) in limits.items():
        if type(meta.get(name)) is not int or not least <= meta[name] <= most:
            raise IndexFormatError(f"{path} is damaged: {name} is {meta.get(name)!r}, outside {least}..{most}")
    if meta.get("metric") not in METRICS or meta.get("dtype") not in DTYPES:
        raise IndexFormatError(f"{path} is damaged: metric {meta.get('metric')!r}, dtype {meta.get('dtype')!r}")
    if not isinstance(meta.get("scale"), float) or not 2.0**-1000 <= meta["scale"] < float("inf"):
        raise IndexFormatError(f"{path} is damaged: scale is {meta.get('scale')!r}")
    files = meta.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(facts, dict) and isinstance(facts.get("bytes"), int) and isinstance(facts.get("sha256"), str)
        for facts in files.values()
    ):
        raise IndexFormatError(f"{path} is damaged: its list of files cannot be read")
    return meta


# numpy parses headers with `ast`, which fails in CPython 3.11 if two threads use it at once and a garbage collection
# switches between them: "AST constructor recursion depth mismatch".
_HEADERS = threading.Lock()


def _map(path: Path, facts: dict[str, Any], shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        length = _regular_size(path)
    except OSError as error:
        raise IndexFormatError(f"{path} cannot be read: {error.strerror}") from None
    if length != facts["bytes"]:
        raise IndexFormatError(f"{path} has {length} bytes, not {facts['bytes']}: it is truncated or was altered")
    try:
        with _HEADERS:
            array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")  # no pickles, no archives
    except OSError as error:
        raise IndexFormatError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # numpy parses the header with Python's parser: any error is possible
        raise IndexFormatError(f"{path} is not an array: {error}") from None
    expected = shape
    if shape[-1] == -1 and array.ndim == len(shape):  # any length
        expected = (*shape[:-1], array.shape[-1])
    if array.shape != expected or array.dtype != np.dtype(dtype) or not array.flags.c_contiguous:
        raise IndexFormatError(f"{path} holds {array.dtype} {array.shape}; {np.dtype(dtype)} {expected} was expected")
    if array.ctypes.data % _ALIGNMENT:
        raise IndexFormatError(f"{path} is damaged: its contents do not begin on a boundary of {_ALIGNMENT} bytes")
    return array


def _regular_size(path: Path) -> int:
    """Return a file's size. Raises OSError for anything but a regular file: reading a pipe would block forever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return status.st_size


def _sha256(path: Path) -> str:
    _regular_size(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
