"""The path of a request: frontend, router, prefill, decode, and the model they run."""
