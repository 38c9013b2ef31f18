"""Engine over servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp's server, hosted ones, another node.

Trinity retrieves, assembles prompts and probes; the server only generates tokens.

```
engine.py         `OpenAiEngine`: accepts requests, runs their tasks, enforces deadlines
writer.py         one request from retrieval to its end: retrieve → assemble → stream → probe → … → end
probing.py        searches of the pool during generation
relay.py          a server's chunks → the client's
handover.py       KV hand-over between prefill and decode servers
transfer.py       fields of the requests of a hand-over, by engine: vLLM, SGLang
load_balancer.py  choice of a server: least loaded, by prefix overlap; health checks
signals.py        what the control loop and the planner read about the engine
kv_events.py      what servers publish of their KV caches
server.py         one server: requests, server-sent events, mapping of its errors
http.py           the HTTP client below it, over aiohttp
capabilities.py   detection of a server's capabilities, also for `trinity doctor`
assembly.py       passages in a chat's system turn or question, or before a prompt
continuation.py   continuation of an answer in another request: by token ids, as a chat, or as text
```
"""
