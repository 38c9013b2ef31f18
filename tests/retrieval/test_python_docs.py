"""The corpus of Python's own documentation: complete, bounded, searchable passages."""

import numpy as np
import pytest

from runtime.retrieval.collections.documents import Document
from runtime.retrieval.embedding.embedder import embedding_text
from runtime.retrieval.embedding.loading import load_embedder
from runtime.retrieval.ingestion.python_docs import python_documents
from tests.retrieval.test_embedder import needs_minilm


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return python_documents()


def test_a_section_that_several_topics_have_is_in_the_smallest(documents: list[Document]) -> None:
    whole = "\n\n".join(document.text for document in documents)
    assert whole.count('The context manager’s "__exit__()" method is invoked.') == 1
    assert not any(
        document.id.startswith("compound#") and "context manager’s" in document.text for document in documents
    )
    assert "    if not exit(manager, *sys.exc_info()):" in whole


@needs_minilm
def test_questions_find_the_topic_that_answers_them(documents: list[Document]) -> None:
    # Only the topics that could be mixed up: embedding all of the reference takes half a minute.
    topics = {"with", "context-managers", "try", "raise", "for", "while", "lambda", "global", "truth", "del"}
    some = [document for document in documents if document.id.split("#")[0] in topics]
    embedder = load_embedder("all-minilm-l6-v2")
    matrix = embedder.embed([embedding_text(document.title, document.text) for document in some])
    for question, expected in {
        "How does a with statement call __exit__?": {"with", "context-managers"},
        "When is the finally clause executed?": {"try"},
        "What happens to the else clause of a for loop after break?": {"for", "while"},
        "Which objects are considered false?": {"truth"},
        "How do I write an anonymous function?": {"lambda"},
    }.items():
        best = np.argsort(-(matrix @ embedder.embed([question])[0]))[:2]
        assert {some[row].id.split("#")[0] for row in best} & expected, question
