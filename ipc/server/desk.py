"""What the compiled exchange of requests and results works on: a desk, and a row for each client."""

import numpy as np

from ipc.errors import InvalidArgument
from ipc.ring.exchange import (
    BELLS,
    CLIENT_WORDS,
    CLIENTS,
    DESK_WORDS,
    EPOCH,
    MAX_K,
    MAX_TOP_M,
    ROWS,
    TO_RING,
    WATCH,
)
from ipc.ring.ring import Watch
from ipc.server.places import ClientPlace


class Desk:
    """The tables of `exchange.py`, and the clients in their rows. `address` and `words` are the desk's.

    A client keeps its row as long as it is attached. A row that becomes vacant is given to nobody before
    `take_vacated` has told whoever keeps requests by their client's row.
    """

    def __init__(self, epoch: int, max_k: int, max_top_m: int, most: int) -> None:
        words = np.zeros(DESK_WORDS, np.int64)
        self._keep = words
        self._rows = np.zeros((most, CLIENT_WORDS), np.int64)
        self.address = int(words.ctypes.data)
        self.words = words.data
        self.words[EPOCH], self.words[MAX_K], self.words[MAX_TOP_M] = epoch, max_k, max_top_m
        self.words[CLIENTS] = int(self._rows.ctypes.data)
        self.places: list[ClientPlace | None] = [None] * most
        self._vacated: set[int] = set()
        self._look_at_all()

    def put(self, place: ClientPlace) -> None:
        """Give a client a row. Raises `InvalidArgument` if there is none."""
        for row, there in enumerate(self.places):
            if there is None and row not in self._vacated:
                self.places[row] = place
                place.sit(row, self._rows[row])
                self._look_at_all()
                return
        raise InvalidArgument(f"all {len(self.places)} rows for clients are taken")

    def remove(self, place: ClientPlace) -> None:
        """The client is gone."""
        self.places[place.row] = None
        self._rows[place.row] = 0
        self._vacated.add(place.row)
        self._look_at_all()

    @property
    def vacant(self) -> bool:
        """Whether `take_vacated` has something to tell."""
        return bool(self._vacated)

    def take_vacated(self) -> list[int]:
        """Rows whose clients are gone since the last call; others may have them from now on."""
        vacated = sorted(self._vacated)
        self._vacated.clear()
        return vacated

    def ring_bells(self) -> None:
        """Ring those that compiled code could not."""
        if not self.words[BELLS]:
            return
        self.words[BELLS] = 0
        for place in self.places:
            if place is not None and place.words[TO_RING]:
                place.words[TO_RING] = 0
                place.bell.ring()

    def _look_at_all(self) -> None:
        used = max((row + 1 for row, place in enumerate(self.places) if place is not None), default=0)
        self.watch = Watch([None if place is None else place.requests for place in self.places[:used]])
        self.words[ROWS], self.words[WATCH] = used, self.watch.address
