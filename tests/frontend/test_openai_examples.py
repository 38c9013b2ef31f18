"""OpenAI's published example of file search: its calls, in their order and with their parameters.

The cookbook "Using file search tool in the Responses API", and what the guides of retrieval and file search do beyond
`test_stores.py`, `test_vector_stores.py` and `test_responses.py`. Only the address differs.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.node.config import HttpSection
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.store_node import store_node
from tests.frontend.test_stores import wait_indexed
from tests.retrieval.sample_files import pdf

MODEL, SMALL_MODEL = "gpt-4o", "gpt-4o-mini"
SETTINGS = Settings("tiny", {"notes": 64}, http=HttpSection(model_aliases=(MODEL, SMALL_MODEL, "tiny")))
FACTS = {
    "Deep research": "Deep research reads many pages of the web for one answer.",
    "Operator": "Operator clicks and types in a browser of its own.",
    "Data residency": "Data residency keeps the data of customers in Europe.",
}
QUESTION = "What is deep research by OpenAI?"
CITING = f"{QUESTION} answer=Deep_research_reads_many_pages_of_the_web_for_one_answer._It_is_new."


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with store_node(tmp_path / "stores", SETTINGS) as cluster:
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
        input=CITING, model=SMALL_MODEL, tools=[{"type": "file_search", "vector_store_ids": [store.id]}]
    )
    assert {one.filename for one in answer.output[1].content[0].annotations} == {pdfs[0].name}
    assert answer.output[1].content[0].text.startswith(FACTS["Deep research"])
    assert answer.output[0].results is None
    answer = client.responses.create(
        input=CITING, model=SMALL_MODEL, tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
        include=["output[*].file_search_call.search_results"],  # type: ignore[list-item]
    )  # fmt: skip
    assert answer.output[0].results[0].filename == pdfs[0].name
    made: Any = client.responses.create(input="Can you generate a question that … say=3", model=MODEL)
    assert made.output[0].content[0].text == "w0 w1 w2 "

    def process_query(question: str) -> list[str]:
        response: Any = client.responses.create(
            input=question, model=SMALL_MODEL, tool_choice="required",
            tools=[{"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 5}],
        )  # fmt: skip
        return [one.filename for one in response.output[1].content[0].annotations[:5]]

    questions = [f"About: {fact} answer={fact.replace(' ', '_')}" for fact in FACTS.values()]
    with ThreadPoolExecutor() as executor:
        assert list(executor.map(process_query, questions)) == [[path.name] for path in pdfs]


def test_the_guides_searches_with_rewriting_and_each_of_their_rankers_are_answered(client: openai.OpenAI) -> None:
    store = client.vector_stores.create(name="Support FAQ")
    text = b"Each passenger may take two woodchucks."
    client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=("customer_policies.txt", text))
    query = "How many woodchucks are allowed per passenger?"
    page = client.vector_stores.search(vector_store_id=store.id, query=query, rewrite_query=True)
    assert page.search_query == [query]  # type: ignore[attr-defined]
    assert page.data[0].content[0].text == text.decode()
    for ranker in ("auto", "default-2024-08-21"):
        options: Any = {"ranker": ranker, "score_threshold": 0.0}
        assert client.vector_stores.search(store.id, query=query, ranking_options=options).data == page.data


def test_a_model_has_its_aliases_and_answers_bear_its_own_name(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny", MODEL, SMALL_MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "say=1"}])
    assert (chat.model, chat.choices[0].message.content) == ("tiny", "w0 ")
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' is not served; served: 'tiny'"):
        client.responses.create(model="gpt-4", input="say=1")
