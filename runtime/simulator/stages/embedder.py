"""The thread beside a simulated worker's loop that embeds texts, one after the other (`retrieval.embedding`)."""

from runtime.simulator.events import Events, ns


class Embedder:
    """Each text takes `embed_s`."""

    def __init__(self, events: Events, embed_s: float) -> None:
        self._events, self._each_ns = events, ns(embed_s)
        self._free_ns = 0

    def begin(self) -> int:
        """Have a text embedded: when its vector is there."""
        self._free_ns = max(self._free_ns, self._events.now_ns) + self._each_ns
        return self._free_ns
