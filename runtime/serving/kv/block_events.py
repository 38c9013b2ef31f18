"""Fills and evictions of a worker's KV blocks, in batches for the frontend's router (`frontend/cached_blocks.py`)."""

from itertools import islice

from runtime.serving.kv.blocks import BlockManager
from runtime.serving.messages import Cached

BATCH_KEYS = 2048  # 32 KB


class BlockEvents:
    """The changes of a worker's blocks since its last batch: for each block only the latest one.

    The first batch, and that after `restart`, begins with all blocks and makes earlier ones void. If nobody takes
    batches, the changes are dropped when they outnumber the blocks twice, and the next batch begins anew.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._changes: dict[bytes, bool] = {}
        self._begins = True
        self.number = 0  # of the last batch
        blocks.on_change = self._changed

    def restart(self) -> None:
        """Begin anew: the reader has missed a batch, or is another one."""
        self._changes = dict.fromkeys(self._blocks.registered, True)
        self._begins = True

    def _changed(self, key: bytes, cached: bool) -> None:
        self._changes[key] = cached
        if len(self._changes) > 2 * self._blocks.total:
            self.restart()

    @property
    def pending(self) -> int:
        """Number of changes for the next batches."""
        return len(self._changes)

    def take(self, worker: str, epoch: int) -> Cached | None:
        """Return the next batch of at most `BATCH_KEYS` changes; None without any."""
        if not self._changes and not self._begins:
            return None
        keys = list(islice(self._changes, BATCH_KEYS))
        changes = [(key, self._changes.pop(key)) for key in keys]
        self.number += 1
        begins, self._begins = self._begins, False
        return Cached(
            worker, epoch, self.number, begins,
            b"".join(key for key, cached in changes if cached), b"".join(key for key, cached in changes if not cached),
        )  # fmt: skip
