"""Servers that speak OpenAI's protocol as the engine: vLLM, SGLang, llama.cpp's server, hosted ones, another node.

Retrieval, prompts and probes are Trinity's own here; the server is asked for tokens alone.

```
engine.py       the interface, made from the configuration: requests in, pieces out, each ends once
writer.py       one request's course: retrieve → assemble → stream → probe → … → end
probing.py      what is asked of the pool while an answer is written
relay.py        from a server's chunks to the pieces of an answer
handover.py     prompts computed by one server for another
servers.py      which server takes it: the least loaded of those that answer; who is down is asked again
server.py       one server's HTTP (by `http.py`) and its streams' events, and its errors as ours
abilities.py    what a server can do, found by asking it, also for `trinity doctor`
assembly.py     passages in a chat's system turn, or before a prompt
sequel.py       how an answer goes on in another request: by token ids, as a chat, or as text
```
"""
