"""The lines of a text file by their relevance to a question, by the reranker of a node with `[rerank]`.

python docs/examples/rerank.py http://127.0.0.1:8080/v1 handbook.md "How long is parental leave?"
"""

import sys
from pathlib import Path

import httpx

if len(sys.argv) != 4:
    print("usage: python docs/examples/rerank.py URL FILE QUESTION", file=sys.stderr)
    sys.exit(2)
url, path, question = sys.argv[1:]
if not Path(path).is_file():
    sys.exit(f"{path}: no such file")
lines = [line for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
try:
    with httpx.Client(base_url=url + "/", timeout=60) as http:
        body = {"query": question, "documents": lines[:1024], "top_n": 5}
        found = http.post("rerank", json=body).raise_for_status().json()
except httpx.HTTPStatusError as error:
    sys.exit(f"{error.request.url} returned {error.response.status_code}: {error.response.text}")
except (httpx.HTTPError, httpx.InvalidURL) as error:
    sys.exit(f"{url}: {error}")
for result in found["results"]:
    print(f"{result['relevance_score']:.3f} {result['document']['text']}")
