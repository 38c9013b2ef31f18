"""What an index is made of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu.rows import Rows


@dataclass(frozen=True)
class IndexData:
    """Encoded vectors, the graph over them, where searches begin, and the caller's ids.

    graph: uint32 [N, degree], C order. seeds: uint32 [S], distinct rows. ids: int64 [N], or None for row numbers.
    """

    rows: Rows
    graph: npt.NDArray[np.uint32]
    seeds: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int64] | None

    def ids_of(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The caller's ids of row numbers; -1 stays -1."""
        if self.ids is None:
            return nodes
        if len(nodes) and nodes.min() >= 0:
            return self.ids[nodes]
        return np.where(nodes >= 0, self.ids[np.maximum(nodes, 0)], -1)
