"""k-nearest-neighbour lists: exact for small sets, with inverted lists (IVF) for large ones.

k-means partitions the space into cells of about 512 vectors; every vector is compared with the members of its nearest
cells, with one matrix product per cell. Cells are disjoint, so no pair is compared twice.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from gpu.compiled import counted
from gpu.index.rows import FloatArray

Neighbors = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]
Progress = Callable[[float], None]

EXACT_LIMIT = 8192
_CELL = 512
_PROBES = 8
_LARGEST_CELL = 4 * _CELL
_BLOCK = 2048
_LLOYD_ROUNDS = 6
_SAMPLE_PER_CELL = 64
_NO_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)


def nearest_neighbors(space: FloatArray, k: int, seed: int, threads: int, progress: Progress) -> Neighbors:
    """Return the approximate k nearest other rows of each row, nearest first: uint32 [N, k].

    space: float32 [N, d], under squared L2. k must be below N. Lists are full, without duplicates and without the row
    itself; up to 8192 rows they are exact.
    """
    count = len(space)
    norms = np.einsum("ij,ij->i", space, space)
    keys = np.full((count, k), _NO_KEY, np.uint64)
    everyone = np.arange(count)
    exact = count <= EXACT_LIMIT
    visits = [(everyone, everyone)] if exact else _cells(space, np.random.default_rng(seed), threads)
    compared, total = [0], sum(len(visitors) for visitors, _ in visits)

    def compare(share: list[tuple[Indices, Indices]]) -> None:
        for visitors, members in share:
            _compare_cells(space, norms, visitors, members, keys)
            compared[0] += len(visitors)
            progress(compared[0] / total)

    # Each thread processes its own visitors in all cells, so no two threads write the same rows of `keys`.
    if threads == 1 or len(visits) == 1:
        compare(visits)
    else:
        with ThreadPoolExecutor(threads) as pool:
            shares = [[(v[v % threads == share], m) for v, m in visits] for share in range(threads)]
            list(pool.map(compare, shares))
    if (keys[:, -1] == _NO_KEY).any():
        _fill(keys, count)
    progress(1.0)
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def exact_sample(space: FloatArray, rows: Indices, k: int) -> Indices:
    """Return the exact k nearest other rows of some rows, unordered: int64 [len(rows), k]."""
    distances = np.einsum("ij,ij->i", space, space) - 2 * (space[rows] @ space.T)
    distances[np.arange(len(rows)), rows] = np.inf
    return np.argpartition(distances, k - 1, axis=1)[:, :k]


def _cells(space: FloatArray, random: np.random.Generator, threads: int) -> list[tuple[Indices, Indices]]:
    """Return cells as (visitors, members) of rows: a row visits its nearest cells and is a member of the nearest."""
    count = len(space)
    cell_count = count // _CELL
    sample = space[random.permutation(count)[: cell_count * _SAMPLE_PER_CELL]]
    centres = sample[:cell_count].copy()
    for _ in range(_LLOYD_ROUNDS):
        owners = _nearest_centres(sample, centres, 1, threads)[:, 0]
        sums, sizes = np.zeros(centres.shape, np.float64), np.bincount(owners, minlength=cell_count)
        _add_rows(sample, owners, sums)
        centres = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres).astype(np.float32)
    probes = _nearest_centres(space, centres, min(_PROBES, cell_count), threads)
    by_owner = np.argsort(probes[:, 0], kind="stable")
    ends = np.cumsum(np.bincount(probes[:, 0], minlength=cell_count))
    visits = np.argsort(probes, axis=None, kind="stable") // probes.shape[1]
    visit_ends = np.cumsum(np.bincount(probes.ravel(), minlength=cell_count))
    cells = []
    for cell in range(cell_count):
        members = by_owner[ends[cell - 1] if cell else 0 : ends[cell]]
        visitors = visits[visit_ends[cell - 1] if cell else 0 : visit_ends[cell]]
        if len(members) == 0:
            continue
        # Many equal vectors form one huge cell: split it to keep the work linear.
        parts = -(-len(members) // _LARGEST_CELL)
        if parts == 1:
            cells.append((visitors, members))
            continue
        part_of = np.full(count, -1, np.int32)
        part_of[visitors] = np.arange(len(visitors)) % parts
        part_of[members] = random.permutation(len(members)) % parts
        cells += [(visitors[part_of[visitors] == part], members[part_of[members] == part]) for part in range(parts)]
    return cells


def _nearest_centres(space: FloatArray, centres: FloatArray, count: int, threads: int) -> npt.NDArray[np.int32]:
    """Return the nearest centres of each row, nearest first: int32 [N, count]."""
    out = np.empty((len(space), count), np.int32)
    norms = np.einsum("ij,ij->i", centres, centres)

    def block(begin: int) -> None:
        distances = norms - 2 * (space[begin : begin + _BLOCK] @ centres.T)
        _smallest(distances, out[begin : begin + _BLOCK])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(block, range(0, len(space), _BLOCK)))
    return out


def _compare_cells(
    space: FloatArray, norms: FloatArray, visitors: Indices, members: Indices, keys: npt.NDArray[np.uint64]
) -> None:
    theirs, their_norms = space[members], norms[members]
    for begin in range(0, len(visitors), _BLOCK):
        some = visitors[begin : begin + _BLOCK]
        distances = space[some] @ theirs.T
        _insert_candidates(distances, norms, their_norms, some, members, keys)


@counted
def _add_rows(rows: FloatArray, owners: npt.NDArray[np.int32], sums: npt.NDArray[np.float64]) -> None:
    for i in range(len(rows)):
        for j in range(rows.shape[1]):
            sums[owners[i], j] += rows[i, j]


@counted
def _smallest(values: FloatArray, out: npt.NDArray[np.int32]) -> None:
    """Write the indices of the smallest values of each row, in ascending order of value."""
    width = out.shape[1]
    best = np.empty(width, values.dtype)
    for i in range(len(values)):
        best[:] = np.inf
        for j in range(values.shape[1]):
            value = values[i, j]
            if value < best[width - 1]:
                position = width - 1
                while position > 0 and best[position - 1] > value:
                    best[position] = best[position - 1]
                    out[i, position] = out[i, position - 1]
                    position -= 1
                best[position] = value
                out[i, position] = j


@counted
def _insert_candidates(
    dots: FloatArray,
    norms: FloatArray,
    member_norms: FloatArray,
    visitors: Indices,
    members: Indices,
    keys: npt.NDArray[np.uint64],
) -> None:
    """Insert members into the visitors' sorted lists. A key is the squared distance's bits, then the row number."""
    k = keys.shape[1]
    bits = np.empty(1, np.float32)
    as_int = bits.view(np.uint32)
    for i in range(len(visitors)):
        visitor = visitors[i]
        mine = keys[visitor]
        as_int[0] = np.uint32(min(mine[k - 1] >> np.uint64(32), np.uint64(0x7F800000)))
        worst = bits[0]
        for j in range(len(members)):
            distance = norms[visitor] + member_norms[j] - np.float32(2) * dots[i, j]
            if distance <= worst and members[j] != visitor:
                bits[0] = max(distance, np.float32(0))  # cancellation can yield a small negative value
                key = (np.uint64(as_int[0]) << np.uint64(32)) | np.uint64(members[j])
                if key >= mine[k - 1]:
                    continue
                low, high = 0, k - 1
                while low < high:
                    middle = (low + high) >> 1
                    if mine[middle] < key:
                        low = middle + 1
                    else:
                        high = middle
                for position in range(k - 1, low, -1):
                    mine[position] = mine[position - 1]
                mine[low] = key
                as_int[0] = np.uint32(min(mine[k - 1] >> np.uint64(32), np.uint64(0x7F800000)))
                worst = bits[0]


@counted
def _fill(keys: npt.NDArray[np.uint64], count: int) -> None:
    """Fill short lists with the rows after the row itself (only if its cells have fewer rows than a list)."""
    k = keys.shape[1]
    for i in range(count):
        filled = k
        while filled > 0 and keys[i, filled - 1] == _NO_KEY:
            filled -= 1
        other = i
        while filled < k:
            other = (other + 1) % count
            known = False
            for j in range(filled):
                known |= (keys[i, j] & np.uint64(0xFFFFFFFF)) == np.uint64(other)
            if not known:
                keys[i, filled] = (np.uint64(0x7F800000) << np.uint64(32)) | np.uint64(other)
                filled += 1
