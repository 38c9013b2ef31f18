"""A chat with retrieval through OpenAI's client. The response's `retrieval` lists the passages.

python docs/examples/chat.py http://127.0.0.1:8080/v1 MODEL "How does a with statement call __exit__?"
"""

import sys

from httpx import InvalidURL
from openai import OpenAI, OpenAIError

if len(sys.argv) != 4:
    print("usage: python docs/examples/chat.py URL MODEL QUESTION", file=sys.stderr)
    sys.exit(2)
url, model, question = sys.argv[1:]
try:
    with OpenAI(base_url=url, api_key="unused") as client:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            temperature=0,
            extra_body={"retrieval": {"k": 3}},
        )
except (OpenAIError, InvalidURL) as error:
    sys.exit(f"{url}: {error}")
print(answer.choices[0].message.content)
for number, passage in enumerate((answer.model_extra or {})["retrieval"]["passages"], 1):
    print(f"[{number}] {passage['title']} ({passage['id']})")
