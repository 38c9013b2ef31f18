"""Python's own language reference as a corpus: the topics of `help()`, cut into titled passages.

`pydoc_data.topics` is on every Python: reStructuredText rendered as plain text, whose headings are underlined as in
Markdown. Some topics repeat others as their sections ("compound" holds "with"); the smaller topic keeps the section.
"""

import re

from runtime.retrieval.collections.documents import Document
from runtime.retrieval.ingestion.passages import file_passages
from runtime.retrieval.ingestion.sections import ParsedFile
from runtime.retrieval.ingestion.text import read_markdown

PASSAGE_WORDS = 120
_PAGE_TITLE = re.compile(r"^\*{3,}$", re.MULTILINE)


def python_documents() -> list[Document]:
    """Return the reference's passages; id `with#2` is the second passage of topic "with".

    The result is the same on every run of one Python version.
    """
    from pydoc_data.topics import topics  # half a megabyte: imported only when needed

    documents: list[Document] = []
    seen: set[str] = set()
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        page = read_markdown(_PAGE_TITLE.sub("===", topics[topic]).encode())
        fresh = [section for section in page.sections if section.text not in seen]
        seen |= {section.text for section in fresh}
        passages = file_passages(ParsedFile(page.title, fresh), topic, PASSAGE_WORDS, _words)
        documents += [Document(f"{topic}#{number}", one.title, one.text) for number, one in enumerate(passages, 1)]
    return sorted(documents, key=lambda document: (document.id.split("#")[0], int(document.id.split("#")[1])))


def _words(text: str) -> int:
    return len(text.split())
