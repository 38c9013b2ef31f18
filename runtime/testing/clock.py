"""A clock that stands still until it is told to move."""


class Clock:
    """Called, it tells the time in ns, as `time.monotonic_ns` does."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)
