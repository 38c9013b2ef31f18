"""The open builds of a collection in a client process."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.errors import Overloaded
from runtime.retrieval.background_task import BackgroundTask
from runtime.retrieval.collections.served_documents import CollectionDocuments

_KEPT = 4  # builds that no pool serves any more, kept open for results that are still in flight
_RETRY_NS = 1_000_000_000  # interval between attempts to open a build that was missing
_UNREADABLE_NS = 5_000_000_000  # the same of one whose documents could not be read

log = logging.getLogger(__name__)


class CollectionBuilds:
    """The open builds of one collection, least recently served first.

    The pools verify the checksums of all files.

    opening: a build that is being opened on a thread, so that no loop waits for the disk.
    """

    def __init__(self, name: str, directory: Path, clock: Callable[[], int]) -> None:
        self._name, self.directory, self._clock = name, directory, clock
        self.opening: BackgroundTask[CollectionDocuments] | None = None
        self.by_identity: dict[str, CollectionDocuments] = {}
        self.current: CollectionDocuments | None = None
        self.error = ""
        self._served: frozenset[str] = frozenset()
        self._followed: Sequence[str] = ()  # the builds served last, if all were usable
        self._missing = ("", 0)  # the identity that was missing last, and the time of the next attempt (ns)

    def has(self, identity: str) -> bool:
        """Return whether this build's documents are usable; begins to open what the directory contains, if not."""
        if identity in self.by_identity and self.opening is None:  # as for nearly every search
            return True
        self._finish_opening()
        if identity not in self.by_identity and self.opening is None:
            now, (missing, retry_ns) = self._clock(), self._missing
            if identity == missing and now < retry_ns:
                return False
            self._missing = identity, now + _RETRY_NS
            try:
                self.opening = BackgroundTask("documents", lambda _: CollectionDocuments(self.directory))
            except Overloaded as error:
                self.set_error(error.message)
        return identity in self.by_identity

    def _finish_opening(self) -> None:
        """Keep the build that was opened on the thread."""
        if self.opening is None or not self.opening.done:
            return
        task, self.opening = self.opening, None
        if task.result is None:
            self.set_error(task.error_message)
        elif self._keep(task.result).identity != self._missing[0]:
            self.set_error(
                f"{self.directory} contains another build than the pools serve; "
                "`trinity index reload` makes the pools load it"
            )

    @property
    def reason(self) -> str:
        """Why no build can be used now."""
        return self.error or "the documents of the build that the pools serve are not open yet"

    def discard(self, build: CollectionDocuments, error: str) -> None:
        """Close a build whose documents cannot be read; it is opened again later, or when the pools serve it anew."""
        if self.by_identity.get(build.identity) is not build:
            return  # closed already: of several searches each finds that they cannot be read
        self._missing = build.identity, self._clock() + _UNREADABLE_NS
        self.by_identity.pop(build.identity, None)
        build.close()
        if self.current is build:
            self.current = None
        self.set_error(error)

    def open(self) -> CollectionDocuments:
        """Open the build that the directory contains now. Raises `CollectionError`."""
        return self._keep(CollectionDocuments(self.directory))

    def _keep(self, documents: CollectionDocuments) -> CollectionDocuments:
        if documents.identity in self.by_identity:
            documents.close()
        return self.by_identity.setdefault(documents.identity, documents)

    def follow(self, served: Sequence[str]) -> bool:
        """Make the builds that the pools serve available, and close those that have not been served for long.

        Returns False if nothing has changed.
        """
        if served and served == self._followed and not self.error and all(map(self.has, served)):
            return False
        self._followed = ()
        self._finish_opening()
        if set(served) - self._served:
            self._missing = self._missing[0], 0  # tried at once
        self._served = frozenset(served)
        usable = [identity for identity in served if self.has(identity)]
        if not served:
            return True
        if not usable:
            self.current = None
            return True
        self.error = ""
        if self.current is None or self.current.identity not in usable:
            self.current = self.by_identity[usable[-1]]
        for identity in usable:
            self.by_identity[identity] = self.by_identity.pop(identity)
        for identity in list(self.by_identity)[: -len(usable) - _KEPT]:
            self.by_identity.pop(identity).close()
        if len(usable) == len(served):
            self._followed = served
        return True

    def set_error(self, error: str) -> None:
        """Record why the documents cannot be used; log it once."""
        if error != self.error:
            log.error("collection %s: its documents cannot be used: %s", self._name, error)
        self.error = error
