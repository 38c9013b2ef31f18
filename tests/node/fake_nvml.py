"""A fake of NVML's Python module over GPUs that a test describes."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class NVMLErrorNotFound(NVMLError):
    pass


@dataclass
class Card:
    uuid: str
    bus: str = "00000000:17:00.0"
    name: str = "NVIDIA H100"
    total: int = 80 << 30
    used: int = 8 << 30
    busy: int = 40
    memory_busy: int = 25
    instances: list[str] = field(default_factory=list)  # UUIDs of MIG instances
    power_mw: int | None = 350_000  # None: not supported
    failed: bool = False  # its memory cannot be read
    parent: "Card | None" = None
    capability: tuple[int, int] = (9, 0)


class FakeNvml:
    """Argument for `Gpus`. `peers`: pairs of indexes with peer access."""

    NVMLError = NVMLError
    NVMLError_NotFound = NVMLErrorNotFound
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_STATUS_OK = 0

    def __init__(self, cards: list[Card], broken: str = "", peers: set[tuple[int, int]] | None = None) -> None:
        self._cards = cards
        self._broken = broken
        self._peers = peers or set()

    def nvmlInit(self) -> None:  # noqa: N802
        if self._broken:
            raise NVMLError(self._broken)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        return self._cards[index]

    def nvmlDeviceGetMigMode(self, card: Card) -> tuple[int, int]:  # noqa: N802
        return (1, 1) if card.instances else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        if index >= len(card.instances):
            raise NVMLErrorNotFound("no such instance")
        return Card(card.instances[index], card.bus, "MIG 1g.10gb", total=10 << 30, used=0, power_mw=None, parent=card)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        if card.failed:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(total=card.total, used=card.used, free=card.total - card.used)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        if card.parent is not None:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=card.busy, memory=card.memory_busy)

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:  # noqa: N802
        if card.power_mw is None:
            raise NVMLError("not supported")
        return card.power_mw

    def nvmlDeviceGetPciInfo(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(busId=card.bus)

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> tuple[int, int]:  # noqa: N802
        return card.capability

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetP2PStatus(self, one: Card, other: Card, kind: int) -> int:  # noqa: N802
        pair = (self._cards.index(one), self._cards.index(other))
        return 0 if pair in self._peers or pair[::-1] in self._peers else 4
