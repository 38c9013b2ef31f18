"""Retrieval by itself, and a prompt of one's own around it: for callers that keep their own prompt.

python docs/examples/rag.py http://127.0.0.1:8080/v1 MODEL "How does a with statement call __exit__?"
"""

import sys

import httpx

if len(sys.argv) != 4:
    print("usage: python docs/examples/rag.py URL MODEL QUESTION", file=sys.stderr)
    sys.exit(2)
url, model, question = sys.argv[1:]
try:
    with httpx.Client(base_url=url + "/", timeout=60) as http:
        found = http.post("retrieval", json={"query": question, "k": 3}).raise_for_status().json()
        passages = "\n\n".join(f"[{n}] {one['title']}: {one['text']}" for n, one in enumerate(found["passages"], 1))
        prompt = f"Answer from these passages and cite their numbers.\n\n{passages}\n\nQuestion: {question}"
        messages = [{"role": "user", "content": prompt}]
        answer = http.post("chat/completions", json={"model": model, "messages": messages, "max_tokens": 64})
        written = answer.raise_for_status().json()
except httpx.HTTPStatusError as error:
    sys.exit(f"{error.request.url} answers {error.response.status_code}: {error.response.text}")
except (httpx.HTTPError, httpx.InvalidURL) as error:
    sys.exit(f"{url}: {error}")
print(written["choices"][0]["message"]["content"])
for number, passage in enumerate(found["passages"], 1):
    print(f"[{number}] {passage['title']} ({passage['id']})")
