"""A set that is made on the device: clustered vectors, block by block, and exact neighbours by matrix products."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.data import DataSet, nearest

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]

_BLOCK = 1 << 16  # rows at once
_LATENT, _SPREAD, _NOISE = 12, 2.0, 0.3  # dimensions that matter, how far clusters are apart, what is added in all
_ROWS_A_CLUSTER = 1000
_LEAST_CLUSTERS = 30


def synthetic_set(rows: int, dim: int, queries: int, seed: int, device: str) -> DataSet:
    """Gaussian clusters of low intrinsic dimension, l2, every value one that float16 has; made by torch on a device."""
    import torch

    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=random, device=device)

    basis = normal(_LATENT, dim)
    centres = normal(max(_LEAST_CLUSTERS, rows // _ROWS_A_CLUSTER), _LATENT) * _SPREAD

    def draw(count: int) -> Array:
        found = np.empty((count, dim), np.float32)
        for first in range(0, count, _BLOCK):
            part = found[first : first + _BLOCK]
            cluster = torch.randint(len(centres), (len(part),), generator=random, device=device)
            points = centres[cluster] + normal(len(part), _LATENT)
            part[:] = (points @ basis + _NOISE * normal(len(part), dim)).half().cpu().numpy()
        return found

    base, asked = draw(rows), draw(queries)
    return DataSet(f"made-{dim}-l2", "l2", base, asked, nearest_on(device, base, asked, 10))


def nearest_on(device: str, base: Array, queries: Array, k: int) -> Array:
    """The exact k nearest by squared L2, nearest first: int64 [q, k]; by float32 products on a torch device."""
    import torch

    asked = torch.as_tensor(queries, device=device)
    centre = asked.mean(dim=0)  # distances are differences of products: the less of them cancels, the better
    asked = asked - centre
    best = torch.full((len(asked), k), torch.inf, device=device)
    nodes = torch.full((len(asked), k), -1, dtype=torch.int64, device=device)
    for first in range(0, len(base), _BLOCK):
        part = torch.as_tensor(base[first : first + _BLOCK], device=device).to(torch.float32) - centre
        for some in torch.split(torch.arange(len(asked), device=device), max(1, (1 << 28) // _BLOCK)):
            keys = torch.addmm(part.square().sum(dim=1), asked[some], part.T, alpha=-2)
            keys, found = keys.topk(min(k, len(part)), largest=False)
            keys, order = torch.cat([best[some], keys], dim=1).topk(k, largest=False)
            best[some], nodes[some] = keys, torch.cat([nodes[some], found + first], dim=1).gather(1, order)
    known: Array = nodes.cpu().numpy()
    return known


def random_set(rows: int, dim: int, queries: int, seed: int) -> DataSet:
    """The same kind of set without torch."""
    random = np.random.default_rng(seed)
    basis = random.standard_normal((_LATENT, dim))
    centres = random.standard_normal((_LEAST_CLUSTERS, _LATENT)) * _SPREAD

    def draw(count: int) -> Array:
        points = centres[random.integers(len(centres), size=count)] + random.standard_normal((count, _LATENT))
        return (points @ basis + _NOISE * random.standard_normal((count, dim))).astype(np.float32)

    base, asked = draw(rows), draw(queries)
    return DataSet(f"random-{dim}-l2", "l2", base, asked, nearest(base, asked, 10))
