"""A virtual clock."""


class Clock:
    """Virtual replacement for `time.monotonic_ns`: returns the time in ns, which only `advance` changes."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)
