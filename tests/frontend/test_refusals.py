"""Bodies that are refused, by route: what is changed in a valid one, the parameter at fault, and the message."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.serving.http.api_types import MAX_STOP_CHARS
from runtime.serving.http.ranking import Ranker
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.request_errors import CHAT, COMPLETION, SEARCH, assert_error
from tests.frontend.test_vector_stores import Stand

Rows = list[tuple[dict[str, Any], str, str]]
TOOL: dict[str, Any] = {"type": "file_search", "vector_store_ids": ["docs"]}
NUMBER_BEYOND_ANY_FLOAT = int("1" + "0" * 400)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = Settings("tiny", {"docs": 4, "bare": 0}, max_prompt_bytes=2_000, max_k=8, ranker=Ranker("tiny-ranker"))
    with Cluster(settings=settings, search=Stand()) as cluster:
        yield cluster


def said(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    """A turn of a chat, or of a response's input."""
    return {"role": role, "content": content, **fields}


def docs(**fields: Any) -> dict[str, Any]:
    return {"retrieval": {"collection": "docs", **fields}}


def streamed(**options: Any) -> dict[str, Any]:
    return {"stream": True, "stream_options": options}


CHATS: Rows = [
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": [7]}, "messages[0]", "must be an object, not a number"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "is missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [said("x", role="tool")]}, "messages[0].role", "not 'tool'"),
    ({"messages": [said(5)]}, "messages[0].content", "not a number"),
    ({"messages": [said([{"type": "image_url"}])]}, "messages[0].content", "others are not supported"),
    ({"messages": [said("", role="assistant", tool_calls=[1])]}, "messages[0]", "'tool_calls'"),
    ({"messages": [said("é" * 1001)]}, "messages", "2002 bytes, the limit is 2000"),
    ({"model": None}, "model", "model is missing"),
    ({"temperature": "hot"}, "temperature", "not 'hot'"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2, not 2.5"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"top_p": 0}, "top_p", "greater than 0, not 0"),
    ({"max_tokens": 0}, "max_tokens", "not 0"),
    ({"max_tokens": True}, "max_tokens", "not true"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens", "not '9'"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "set one of them"),
    ({"stop": 3}, "stop", "a string or an array of strings"),
    ({"stop": ["a"] * 5}, "stop", "5 strings, the limit is 4"),
    ({"stop": ""}, "stop", "0 characters"),
    ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop", "1025 characters"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream is true"),
    (streamed(include_usage=1), "stream_options.include_usage", "not 1"),
    (streamed(include_obfuscation=True), "stream_options.include_obfuscation", "must be false, not true"),
    (streamed(include_usages=True), "stream_options.include_usages", "'include_usage'?"),
    ({"stream": True, "stream_options": ["include_usage"]}, "stream_options", "must be an object, not an array"),
    ({"retrieval": True}, "retrieval", "must be an object or false, not true"),
    ({"retrieval": ["docs"]}, "retrieval", "must be an object or false, not an array"),
    ({"retrieval": {}}, "retrieval.collection", "retrieval.collection is missing; loaded: docs, bare"),
    (docs(rerank=1), "retrieval.rerank", "an object, true or false, not 1"),
    (docs(kk=1), "retrieval.kk", "did you mean 'k'?"),
    (docs(k=0), "retrieval.k", "not 0"),
    (docs(k=9), "retrieval.k", "k is 9, the limit is 8"),
    (docs(every_tokens=-1), "retrieval.every_tokens", "not -1"),
    (docs(probe_mode="hope"), "retrieval.probe_mode", "'wait' or 'prefetch'"),
    (docs(probe_tokens=3), "retrieval.probe_tokens", "not 3"),
    (docs(probe_tokens=769), "retrieval.probe_tokens", "the limit is 768"),
    (docs(probe_trigger="hunch"), "retrieval.probe_trigger", "'hunch' is not known; there are every, drift, unsure"),
    (docs(probe_threshold=0.4), "retrieval.probe_threshold", "requires a probe_trigger"),
    ({"ignore_eos": "no"}, "ignore_eos", "not 'no'"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
]
COMPLETIONS: Rows = [
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": {}}, "prompt", "not an object"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": [-1]}, "prompt", "token ids between 0 and"),
    ({"prompt": ["a", "b"]}, "prompt", "2 prompts, the limit is 1"),
    ({"prompt": "x" * 2001}, "prompt", "2001 bytes, the limit is 2000"),
    ({"retrieval": {}}, "retrieval.collection", "retrieval.collection is missing; loaded: docs, bare"),
]
TOKENIZED: Rows = [
    ({"prompt": "x" * 2_001}, "prompt", "prompt has 2001 bytes, the limit is 2000"),
    ({"messages": [said("x" * 1_000), said("y" * 1_001)]}, "messages", "messages has 2001 bytes, the limit is 2000"),
]
SEARCHES: Rows = [
    ({"collection": None}, "collection", "collection is missing; loaded: docs, bare"),
    ({"query": None}, "query", "either query (text) or vector"),
    ({"vector": [1, 2, 3, 4]}, "query", "either"),
    ({"query": ""}, "query", "query is empty"),
    ({"query": None, "vector": [1, 2, 3]}, "vector", "3 numbers, collection 'docs' has dimension 4"),
    ({"query": None, "vector": [1, 2, float("nan"), 4]}, "vector", "vector[2] is not a number (NaN)"),
    ({"query": None, "vector": [1, 2, NUMBER_BEYOND_ANY_FLOAT, 4]}, "vector", "vector[2] is beyond float32"),
    ({"query": None, "vector": [1, 2, 3, 1e39]}, "vector", "vector[3] is beyond float32"),
    ({"query": None, "vector": [1, 2, 3, "4"]}, "vector", "vector[3] must be a number, not a string"),
    ({"query": None, "vector": "abc"}, "vector", "not a string"),
    ({"k": 9}, "k", "k is 9, the limit is 8"),
    ({"top": 3}, "top", "unknown field"),
    ({"query": None, "vector": [1, 2, 3, 4], "rerank": True}, "rerank", "rerank requires a text"),
    ({"rerank": {"timeout_s": 0}}, "rerank.timeout_s", "greater than 0"),
    ({"rerank": {"timeout_s": 61}}, "rerank.timeout_s", "less than or equal to 60"),
    ({"rerank": {"timeout": 1}}, "rerank.timeout", "unknown field rerank.timeout; did you mean 'timeout_s'?"),
    ({"rerank": 1}, "rerank", "rerank must be an object"),
]
WEIGHTS = "ranking_options.hybrid_search.text_weight"
STORE_SEARCHES: Rows = [
    ({"query": None}, "query", "query is missing"),
    ({"query": []}, "query", "0 strings, allowed are 1 to 16"),
    ({"query": ["a"] * 17}, "query", "17 strings, allowed are 1 to 16"),
    ({"query": ["a", ""]}, "query", "query is empty"),
    ({"query": "x" * 2001}, "query", "query has 2001 bytes, the limit is 2000"),
    ({"max_num_results": 9}, "max_num_results", "is 9, the limit is 8"),
    ({"max_num_results": 0}, "max_num_results", "greater than or equal to 1"),
    ({"filters": {"type": "eq", "key": "page"}}, "filters", "has key, type, value"),
    ({"filters": "page = 3"}, "filters", "a filter must be an object with a type"),
    ({"rewrite_query": 1}, "rewrite_query", "valid boolean"),
    ({"ranking_options": {"ranker": "x"}}, "ranking_options.ranker", "known: none, auto, "),
    ({"ranking_options": {"hybrid_search": {"embedding_weight": 1}}}, WEIGHTS, "text_weight is missing"),
    (
        {"ranking_options": {"hybrid_search": {"embedding_weight": 1, "text_weight": -1}}},
        WEIGHTS,
        "greater than or equal to 0",
    ),
    ({"max_results": 3}, "max_results", "unknown field 'max_results'; did you mean 'max_num_r"),
]
EMBEDDINGS: Rows = [
    ({"input": [1, 2, 3]}, "input", "token ids are not supported"),
    ({"input": []}, "input", "0 texts, allowed are 1 to 2048"),
    ({"input": ["a"] * 2049}, "input", "2049 texts"),
    ({"input": ["a", ""]}, "input", "an empty text"),
    ({"dimensions": 32}, "dimensions", "dimensions is 32, vectors of hashing-64 have 64"),
    ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"truncate": True}, "truncate", "unknown field"),
]
RERANKS: Rows = [
    ({"max_tokens_per_doc": 9}, "max_tokens_per_doc", "max_tokens_per_doc is not supported"),
    ({"truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "truncate_prompt_tokens is not supported"),
    ({"top": 1}, "top", "unknown field 'top'"),
    ({"top_n": -1}, "top_n", "not -1"),
    ({"query": ""}, "query", "query is empty"),
    ({"documents": []}, "documents", "documents has 0 entries, allowed are 1 to 1024"),
    ({"documents": ["a"] * 1025}, "documents", "documents has 1025 entries"),
    ({"documents": "a"}, "documents", "documents must be an array"),
    ({"documents": ["a", 1]}, "documents", "documents[1] must be a string"),
    ({"documents": [{"image": "x"}]}, "documents", "documents[0]: 'image' is not supported, only text"),
    ({"documents": [{}]}, "documents", "documents[0] must be a string or an object with a text"),
]
FILE = {"type": "input_file", "file_id": "f"}
RESPONSES: Rows = [
    ({"background": True}, "background", "background is not supported"),
    ({"conversation": "c"}, "conversation", "conversation is not supported"),
    ({"reasoning": {"effort": "low"}}, "reasoning", "reasoning is not supported"),
    ({"text": {"format": {"type": "json_object"}}}, "text", "text is not supported"),
    ({"truncation": "auto"}, "truncation", "truncation is not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools", "the tool 'web_search' is not supported, only file_search"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools", "the tool 'function' is not supported"),
    ({"tools": [TOOL] * 2}, "tools", "the limit is 1"),
    ({"tools": [TOOL | {"max_num_results": 9}]}, "tools[0].max_num_results", "max_num_results is 9, the limit is 8"),
    ({"tools": [TOOL | {"vector_store_ids": ["docs", "bare"]}]}, "tools[0].vector_store_ids", "several vector stores"),
    (
        {"tools": [TOOL | {"probe_triger": "drift"}]},
        "tools[0].probe_triger",
        "unknown field tools[0].probe_triger; did you mean 'probe_trigger'",
    ),
    ({"include": ["message.output_text.logprobs"]}, "include", "only file_search_call.results"),
    ({"input": [said([{"type": "input_image", "image_url": "x"}])]}, "input", "'input_image' is not"),
    ({"input": [said([{"type": "input_audio", "data": "x"}])]}, "input", "'input_audio' is not"),
    ({"input": [said([{"type": "input_file", "file_data": "x"}])]}, "input", "'file_data' of an input_file"),
    ({"input": [said([{"type": "input_file"}])]}, "input", "needs the file_id"),
    ({"input": [said([FILE] * 17)]}, "input", "input has 17 files, the limit is 16"),
    ({"input": [said([FILE])]}, "input", "this node has no files"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "'function_call_output' is not supported"),
    ({"input": []}, "input", "input has no message"),
    ({"input": [said("x", role="tool")]}, "input", "role is 'tool'"),
]
ROUTES: dict[str, tuple[dict[str, Any], Rows]] = {
    "/v1/chat/completions": (CHAT, CHATS),
    "/v1/completions": (COMPLETION, COMPLETIONS),
    "/tokenize": ({}, TOKENIZED),
    "/v1/retrieval": (SEARCH, SEARCHES),
    "/v1/vector_stores/docs/search": ({"query": "leave", "max_num_results": 2}, STORE_SEARCHES),
    "/v1/embeddings": ({"model": "hashing-64", "input": "a"}, EMBEDDINGS),
    "/v1/rerank": ({"query": "cat", "documents": ["dog"]}, RERANKS),
    "/v1/responses": ({"model": "tiny", "input": "say=1"}, RESPONSES),
}


@pytest.mark.parametrize(
    ("path", "change", "param", "message"), [(path, *row) for path, (_, rows) in ROUTES.items() for row in rows]
)
def test_an_invalid_body_is_refused_naming_the_parameter(
    http: httpx.Client, path: str, change: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post(path, content=json.dumps(ROUTES[path][0] | change))
    code = "invalid_filter" if param == "filters" else "invalid_request"
    assert_error(answer, 400, code, param, message)
