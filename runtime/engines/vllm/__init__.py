"""vLLM as the engine: API servers that the node starts, looks after, and asks as it asks any OpenAI server.

```
start.py      for the frontend: the OpenAI engine over the instances' sockets
process.py    a worker of role "engine": one instance, from its start to its end
instance.py   its processes, which all end with the worker; what they say: our log lines, /health, /metrics
command.py    what is run, and whether this version of vLLM can be
transfer.py   how KV gets from prefill to decode, where both have instances of their own (`plugins/`: by files)
```
"""
