"""From a file to a cited answer through OpenAI's client, on a node with `[stores]`.

python docs/examples/file_search.py http://127.0.0.1:8080/v1 handbook.pdf "How long is parental leave?"
"""

import sys
from pathlib import Path

from httpx import InvalidURL
from openai import OpenAI, OpenAIError

if len(sys.argv) != 4:
    print("usage: python docs/examples/file_search.py URL FILE QUESTION", file=sys.stderr)
    sys.exit(2)
url, path, question = sys.argv[1:]
if not Path(path).is_file():
    sys.exit(f"{path}: no such file")
try:
    with OpenAI(base_url=url, api_key="unused") as client:
        model = client.models.list().data[0].id
        store = client.vector_stores.create(name=path)
        client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=Path(path), poll_interval_ms=100)
        answer = client.responses.create(
            model=model,
            input=question,
            tools=[{"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 4}],
            include=["file_search_call.results"],
            max_output_tokens=64,
            temperature=0,
        )
except (OpenAIError, InvalidURL, OSError) as error:
    sys.exit(f"{url}: {error}")
print(answer.output_text)
for item in answer.output:
    if item.type == "file_search_call":
        for number, result in enumerate(item.results or [], 1):
            print(f"[{number}] {result.filename} ({result.score:.2f}): {(result.text or '')[:80]!r}")
    elif item.type == "message" and item.content[0].type == "output_text":
        for citation in item.content[0].annotations:
            if citation.type == "file_citation":
                print(f"cited at {citation.index}: {citation.filename}")
