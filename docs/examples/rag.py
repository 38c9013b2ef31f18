"""Retrieval and generation as two requests, for applications that build the prompt themselves.

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
        passages = "\n\n".join(f"[{n}] {p['title']}: {p['text']}" for n, p in enumerate(found["passages"], 1))
        prompt = f"Answer from these passages and cite their numbers.\n\n{passages}\n\nQuestion: {question}"
        messages = [{"role": "user", "content": prompt}]
        body = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0}
        answer = http.post("chat/completions", json=body)
        completion = answer.raise_for_status().json()
except httpx.HTTPStatusError as error:
    sys.exit(f"{error.request.url} returned {error.response.status_code}: {error.response.text}")
except (httpx.HTTPError, httpx.InvalidURL) as error:
    sys.exit(f"{url}: {error}")
print(completion["choices"][0]["message"]["content"])
for number, passage in enumerate(found["passages"], 1):
    print(f"[{number}] {passage['title']} ({passage['id']})")
