"""CAGRA graph build on a GPU with torch: neighbour lists and pruning on the device, reverse edges on the host.

Imports torch, so it is imported only for such a build.
"""

import numpy as np

from gpu.build.optimize import Graph, link
from gpu.build.params import Progress
from gpu.errors import DeviceError, DeviceUnavailable, OutOfDeviceMemory
from gpu.index.rows import FloatArray

try:
    import torch
    from torch import Tensor

    from gpu.build.torch_knn import Space, nearest_lists
except ImportError as error:
    raise DeviceUnavailable(f"torch is not installed ({error})") from None

_WIDER = 3  # width of the lists, as a multiple of the degree


def check_device() -> None:
    """Raise DeviceUnavailable unless torch has a CUDA device."""
    if not torch.cuda.is_available():
        raise DeviceUnavailable(f"torch {torch.__version__} sees no CUDA device")


def torch_graph(
    vectors: FloatArray | Tensor, degree: int, root: int, seed: int, progress: Progress, device: str = "cuda"
) -> Graph:
    """Build the graph, uint32 [N, degree], N > 2 · degree, of vectors [N, d] under squared L2.

    vectors: float32 on the host, or a tensor of any float type on the device. Every node is reachable from `root`.
    Raises OutOfDeviceMemory, and DeviceError for any other error of torch.
    """
    try:
        space = Space(torch.as_tensor(vectors, device=device))
        lists = nearest_lists(
            space, min(_WIDER * degree, len(space) - 1), seed, lambda done: progress("neighbors", done)
        )
        progress("graph", 0.0)
        kept = prune(lists, degree, space.block)
        graph = link(_on_host(kept), _on_host(lists), degree, root)
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(f"the graph of {tuple(vectors.shape)} vectors does not fit: {error}") from error
    except RuntimeError as error:
        raise DeviceError(f"torch cannot build the graph: {error}") from error
    progress("graph", 1.0)
    return graph


def prune(lists: Tensor, degree: int, block: int) -> Tensor:
    """Return the neighbours with the fewest detours, fewest first, ties by rank: int32 [N, degree] of int32 [N, width].

    Equivalent to `gpu.build.optimize.prune` (CAGRA, arXiv 2308.15136, section 3.2), in blocks of `block` comparisons.
    """
    width = lists.shape[1]
    kept = []
    for mine in torch.split(lists, max(1, block // width**2)):
        detours = torch.zeros_like(mine)
        for rank in range(width - 1):  # detours through the neighbour of this rank
            theirs = lists[mine[:, rank].long()]
            detours[:, rank + 1 :] += (mine[:, rank + 1 :, None] == theirs[:, None, :]).any(dim=2)
        kept.append(mine.gather(1, detours.sort(dim=1, stable=True).indices[:, :degree]))
    return torch.cat(kept)


def _on_host(nodes: Tensor) -> Graph:
    return np.ascontiguousarray(nodes.cpu().numpy()).view(np.uint32)
