"""k-nearest-neighbour lists by matrix products in torch, on a GPU.

Inverted lists (IVF) as in `gpu.build.knn`, with larger cells: every row is compared with the members of its nearest
cells. The number of cells is doubled until the lists reach their recall, measured on a sample of rows. With all cells
visited the lists are exact, which is the case for up to 64 k rows. Beside the vectors and the lists, the device holds a
few blocks of distances.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Progress = Callable[[float], None]

BLOCK = 1 << 26  # elements of a temporary: distances or comparisons
_CELL = 4096
_LARGEST_CELL = 4 * _CELL
_PROBES = 16
_LLOYD_ROUNDS = 6
_SAMPLE_PER_CELL = 64
_VISITORS = 1 << 18  # rows whose visits are sorted by cell together
_GOOD_LISTS = 0.99  # recall of the lists at which no more cells are visited
_SAMPLE = 200


class Space:
    """Vectors [N, d] of any float type on a device, under squared L2."""

    def __init__(self, vectors: Tensor, block: int = BLOCK) -> None:
        """block: maximum number of elements of a temporary, but at least one row."""
        self.block = block
        self._vectors = vectors
        step = max(1, block // vectors.shape[1])
        # Distances are differences of products: subtracting the mean reduces cancellation.
        sums = [part.to(torch.float64).sum(dim=0) for part in torch.split(vectors, step)]
        self._mean = (torch.stack(sums).sum(dim=0) / len(vectors)).to(torch.float32)
        parts = [self._centred(part).square().sum(dim=1) for part in torch.split(vectors, step)]
        self.norms = torch.cat(parts)

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def device(self) -> torch.device:
        return self._vectors.device

    def rows(self, which: Tensor) -> Tensor:
        """Return some vectors minus the mean: float32 [len(which), d]."""
        return self._centred(self._vectors[which])

    def _centred(self, part: Tensor) -> Tensor:
        return part.to(torch.float32) - self._mean


class Lists:
    """Nearest neighbours so far of some rows, including the row itself: `nodes` int32 [rows, width], -1 for none."""

    def __init__(self, space: Space, rows: int, width: int) -> None:
        self._space = space
        self._keys = torch.full((rows, width), torch.inf, device=space.device)
        self.nodes = torch.full((rows, width), -1, dtype=torch.int32, device=space.device)

    @property
    def full(self) -> bool:
        return bool((self.nodes[:, -1] >= 0).all())

    def compare(self, places: Tensor, visitors: Tensor, members: Tensor) -> None:
        """Compare rows `visitors`, whose lists have the indices `places`, with new `members`."""
        space, width = self._space, self.nodes.shape[1]
        theirs, norms, names = space.rows(members), space.norms[members], members.to(torch.int32)
        step = max(1, space.block // len(members))
        for place, visitor in zip(torch.split(places, step), torch.split(visitors, step), strict=True):
            # Squared distances minus the visitor's norm, which does not affect their order.
            keys = torch.addmm(norms, space.rows(visitor), theirs.T, alpha=-2)
            keys, order = keys.topk(min(width, len(members)), largest=False, sorted=False)
            keys = torch.cat([self._keys[place], keys], dim=1)
            nodes = torch.cat([self.nodes[place], names[order]], dim=1)
            self._keys[place], order = keys.topk(width, largest=False)
            self.nodes[place] = nodes.gather(1, order)


class Cells:
    """A k-means partition of a space into disjoint cells; huge cells, of many equal vectors, are split at random."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._random = random = torch.Generator().manual_seed(seed)
        self.count = max(1, len(space) // _CELL)
        sample = torch.randperm(len(space), generator=random)[: self.count * _SAMPLE_PER_CELL].to(space.device)
        self._centres = space.rows(sample[: self.count])
        for _ in range(_LLOYD_ROUNDS if self.count > 1 else 0):
            owners = self._nearest(sample, 1)[:, 0]
            sizes = torch.bincount(owners, minlength=self.count)[:, None]
            sums = torch.zeros_like(self._centres).index_add_(0, owners, space.rows(sample))
            self._centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), self._centres)
        owners = self._nearest(torch.arange(len(space), device=space.device), 1)[:, 0]
        self._parts = (-(-torch.bincount(owners, minlength=self.count) // _LARGEST_CELL)).clamp(min=1)
        self._first = self._parts.cumsum(0) - self._parts
        owners = self._part_of(owners)
        sizes = torch.bincount(owners, minlength=int(self._parts.sum()))
        self._members = torch.split(owners.argsort(stable=True), sizes.tolist())

    def visit(self, lists: Lists, begin: int, end: int, progress: Progress) -> None:
        """Compare every row with the members of its nearest cells number `begin` to `end`."""
        count = len(self._space)
        for first in range(0, count, _VISITORS):
            rows = torch.arange(first, min(first + _VISITORS, count), device=self._space.device)
            visited = self._part_of(self._nearest(rows, end)[:, begin:].reshape(-1))
            visits = visited.argsort(stable=True) // (end - begin) + first
            sizes = torch.bincount(visited, minlength=len(self._members)).tolist()
            for visitors, members in zip(torch.split(visits, sizes), self._members, strict=True):
                if len(visitors) and len(members):
                    lists.compare(visitors, visitors, members)
            progress((first + len(rows)) / count)

    def _nearest(self, rows: Tensor, width: int) -> Tensor:
        """Return the nearest cells of some rows, nearest first: [rows, width]. Larger widths have the same prefix."""
        space, norms = self._space, self._centres.square().sum(dim=1)
        step = max(1, space.block // max(self.count, self._centres.shape[1]))
        found = [
            torch.addmm(norms, space.rows(part), self._centres.T, alpha=-2).sort(dim=1, stable=True).indices[:, :width]
            for part in torch.split(rows, step)
        ]
        return torch.cat(found)

    def _part_of(self, cells: Tensor) -> Tensor:
        """Return a random part of each of these cells."""
        chance = torch.randint(1 << 31, cells.shape, generator=self._random).to(cells.device)
        return self._first[cells] + chance % self._parts[cells]


def nearest_lists(space: Space, k: int, seed: int, progress: Progress = lambda done: None) -> Tensor:
    """Return the approximate k < N nearest other rows of each row, nearest first, without duplicates: int32 [N, k]."""
    count, device = len(space), space.device
    lists, cells = Lists(space, count, k + 1), Cells(space, seed)
    sample = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:_SAMPLE].to(device)
    truth = exact_lists(space, sample, k + 1) if cells.count > _PROBES else None
    visited = 0
    while visited < cells.count:
        target = min(max(_PROBES, 2 * visited), cells.count)
        cells.visit(lists, visited, target, progress)
        visited = target
        if lists.full and truth is not None and list_recall(lists.nodes[sample], truth) >= _GOOD_LISTS:
            break
    # Drop the row itself from its list, or the last entry if more than k equal rows precede it.
    others = lists.nodes != torch.arange(count, device=device, dtype=torch.int32)[:, None]
    others[:, -1] &= ~others.all(dim=1)
    return lists.nodes[others].reshape(count, k)


def exact_lists(space: Space, rows: Tensor, width: int) -> Tensor:
    """Return the exact nearest rows, int32 [rows, width], of some rows, including themselves."""
    lists = Lists(space, len(rows), width)
    places = torch.arange(len(rows), device=space.device)
    for members in torch.split(torch.arange(len(space), device=space.device), _LARGEST_CELL):
        lists.compare(places, rows, members)
    return lists.nodes


def list_recall(lists: Tensor, truth: Tensor) -> float:
    """Return the recall of lists against `truth` [rows, width] of the same rows."""
    return float((truth[:, :, None] == lists[:, None, :]).any(dim=2).float().mean())
