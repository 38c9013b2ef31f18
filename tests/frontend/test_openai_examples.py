"""OpenAI's published example of file search: its calls, in their order and with their parameters.

The cookbook "Using file search tool in the Responses API". The guides' calls are those of `test_stores.py`,
`test_vector_stores.py` and `test_responses.py`. Only the address and the model differ.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.frontend.cluster import Cluster
from tests.frontend.store_node import store_node
from tests.frontend.test_stores import wait_indexed
from tests.retrieval.sample_files import pdf

MODEL = "tiny"
FACTS = {
    "Deep research": "Deep research reads many pages of the web for one answer.",
    "Operator": "Operator clicks and types in a browser of its own.",
    "Data residency": "Data residency keeps the data of customers in Europe.",
}
QUESTION = "What is deep research by OpenAI?"
CITING = f"{QUESTION} answer=Deep_research_reads_many_pages_of_the_web_for_one_answer._It_is_new."


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with store_node(tmp_path / "stores") as cluster:
        yield cluster


@pytest.fixture
def pdfs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name} _ OpenAI.pdf" for name in FACTS]
    for path, text in zip(paths, FACTS.values(), strict=True):
        path.write_bytes(pdf(text, title=path.stem))
    return paths


def test_the_cookbooks_files_are_uploaded_by_threads_searched_and_cited(
    client: openai.OpenAI, pdfs: list[Path]
) -> None:
    store = client.vector_stores.create(name="openai_blog_store")
    assert (store.name, store.file_counts.completed) == ("openai_blog_store", 0)

    def upload(path: Path) -> str:
        with path.open("rb") as file:
            made = client.files.create(file=file, purpose="assistants")
        return client.vector_stores.files.create(vector_store_id=store.id, file_id=made.id).status

    with ThreadPoolExecutor(max_workers=10) as executor:
        uploads = [executor.submit(upload, path) for path in pdfs * 7]  # the example has 21 files
        assert {one.result() for one in as_completed(uploads)} <= {"in_progress", "completed"}
    wait_indexed(client, store.id)
    found = client.vector_stores.search(vector_store_id=store.id, query="What's Deep Research?")
    assert len(found.data) == 10
    assert found.data[0].filename == pdfs[0].name
    assert found.data[0].content[0].text.strip() == FACTS["Deep research"]
    assert found.data[0].score > found.data[-1].score
    answer: Any = client.responses.create(
        input=CITING, model=MODEL, tools=[{"type": "file_search", "vector_store_ids": [store.id]}]
    )
    assert {one.filename for one in answer.output[1].content[0].annotations} == {pdfs[0].name}
    assert answer.output[1].content[0].text.startswith(FACTS["Deep research"])
    made: Any = client.responses.create(input="Can you generate a question that … say=3", model=MODEL)
    assert made.output[0].content[0].text == "w0 w1 w2 "

    def process_query(question: str) -> list[str]:
        response: Any = client.responses.create(
            input=question, model=MODEL, tool_choice="required",
            tools=[{"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 5}],
        )  # fmt: skip
        return [one.filename for one in response.output[1].content[0].annotations[:5]]

    questions = [f"About: {fact} answer={fact.replace(' ', '_')}" for fact in FACTS.values()]
    with ThreadPoolExecutor() as executor:
        assert list(executor.map(process_query, questions)) == [[path.name] for path in pdfs]
