"""Retrieval by itself, and a prompt of one's own around it: for callers that keep their own prompt.

python docs/examples/rag.py http://127.0.0.1:8080/v1 MODEL "How does a with statement call __exit__?"
"""

import sys

import httpx

url, model, question = sys.argv[1:4]
with httpx.Client(base_url=url + "/", timeout=60) as http:
    found = http.post("retrieval", json={"query": question, "k": 3}).raise_for_status().json()
    passages = "\n\n".join(f"[{n}] {one['title']}: {one['text']}" for n, one in enumerate(found["passages"], 1))
    prompt = f"Answer from these passages and cite their numbers.\n\n{passages}\n\nQuestion: {question}"
    messages = [{"role": "user", "content": prompt}]
    answer = http.post("chat/completions", json={"model": model, "messages": messages, "max_tokens": 64})
print(answer.raise_for_status().json()["choices"][0]["message"]["content"])
for number, passage in enumerate(found["passages"], 1):
    print(f"[{number}] {passage['title']} ({passage['id']})")
