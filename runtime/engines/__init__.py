"""Engines: implementations of `runtime.serving.frontend.engine.Engine`, which generate the answers behind the frontend.

`trinity` uses the node's own prefill and decode workers; `openai` uses servers that speak OpenAI's protocol; `vllm`
uses vLLM servers that the node starts. `frontend` is the frontend's process with the configured engine.
"""
