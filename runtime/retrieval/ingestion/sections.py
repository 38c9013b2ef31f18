"""What a reader makes of a file: its title, and its text in sections that a citation can name."""

from dataclasses import dataclass


class Unreadable(Exception):
    """The file cannot be read; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Section:
    """`heading`: those that it stands under, the outermost first. `page`: from 1; 0 where there are no pages."""

    text: str
    heading: str = ""
    page: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """A file's content. `title` "": its name will do."""

    title: str
    sections: list[Section]


class Outline:
    """Collects text under headings as they come. Headings are joined by " › "."""

    def __init__(self) -> None:
        self.title = ""
        self.sections: list[Section] = []
        self._headings: list[tuple[int, str]] = []
        self._text: list[str] = []

    def heading(self, level: int, text: str) -> None:
        """A heading begins; the first of level 1 is the title, if there is none yet."""
        text = " ".join(text.split())
        if not text:
            return
        self._end()
        if level == 1 and not self.title:
            self.title, self._headings = text, []
            return
        self._headings = [(above, name) for above, name in self._headings if above < level] + [(level, text)]

    def text(self, text: str) -> None:
        """A block of text under the last heading."""
        if text.strip():
            self._text.append(text.strip("\n"))

    def read(self) -> Read:
        """All of it."""
        self._end()
        return Read(self.title, self.sections)

    def _end(self) -> None:
        if self._text:
            heading = " › ".join(name for _, name in self._headings)
            self.sections.append(Section("\n\n".join(self._text), heading))
            self._text = []
