"""How long to look at a ring before sleeping: about as long as the last waits took, and not at all if that was long."""

_MARGIN_NS = 2_000
_LONG = 4


class SpinBudget:
    """Learns from waits how long the next one should spin: twice the usual wait, at most `limit_ns`.

    Usual waits beyond the limit make spinning pointless: the budget falls to a token look, and the core stays free for
    others. One long wait counts as four limits at most, so a busy phase is noticed within a few waits.
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._usual_ns = 0.0
        self.ns = limit_ns

    def learn(self, waited_ns: int) -> None:
        """A wait ended with news after `waited_ns`, spinning and sleeping together."""
        limit = self._limit_ns
        self._usual_ns = (self._usual_ns + min(waited_ns, _LONG * limit)) / 2
        wanted = 2 * self._usual_ns + _MARGIN_NS
        self.ns = min(int(wanted), limit) if self._usual_ns <= limit else min(_MARGIN_NS, limit)
