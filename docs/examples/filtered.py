"""A filtered search through OpenAI's client: only passages of one file of the collection `docs`.

python docs/examples/filtered.py http://127.0.0.1:8080/v1 operate.md "What happens when a worker dies?"
"""

import sys

from httpx import InvalidURL
from openai import OpenAI, OpenAIError

if len(sys.argv) != 4:
    print("usage: python docs/examples/filtered.py URL SOURCE QUESTION", file=sys.stderr)
    sys.exit(2)
url, source, question = sys.argv[1:]
try:
    with OpenAI(base_url=url, api_key="unused") as client:
        filters = {"type": "eq", "key": "source", "value": source}
        for result in client.vector_stores.search("docs", query=question, filters=filters, max_num_results=5):
            print(f"{result.score:.2f} {result.filename} {result.content[0].text[:60]!r}")
except (OpenAIError, InvalidURL) as error:
    sys.exit(f"{url}: {error}")
