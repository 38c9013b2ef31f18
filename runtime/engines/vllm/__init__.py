"""Engine "vllm": vLLM API servers that the node starts and supervises, used like any other OpenAI server.

```
engine.py     for the frontend: the OpenAI engine over the instances' sockets
process.py    a worker of role "engine": runs one instance from start to end
instance.py   the instance's processes, its log lines, and reads of its /health and /metrics
command.py    the command line and environment of an instance; version check
transfer.py   KV transfer from prefill to decode instances: connector and options (`plugins/`: a connector by files)
```
"""
