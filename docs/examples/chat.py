"""OpenAI's own client, with passages: what was found comes in the answer's `retrieval`.

python docs/examples/chat.py http://127.0.0.1:8080/v1 MODEL "How does a with statement call __exit__?"
"""

import sys

from openai import OpenAI

url, model, question = sys.argv[1:4]
with OpenAI(base_url=url, api_key="unused") as client:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        extra_body={"retrieval": {"k": 3}},
    )
print(answer.choices[0].message.content)
for number, passage in enumerate((answer.model_extra or {})["retrieval"]["passages"], 1):
    print(f"[{number}] {passage['title']} ({passage['id']})")
