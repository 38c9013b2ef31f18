"""Engines: what writes the answers behind the frontend.

`runtime.serving.frontend.engine.Engine` is the one interface. Two have it: `trinity`, the node's own prefill and decode
workers, and `openai`, servers that run already and speak OpenAI's protocol. `frontend` is the frontend's process with
the one that the configuration names.
"""
