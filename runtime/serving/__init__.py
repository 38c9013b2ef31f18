"""Serving of generation requests: frontend, prefill, decode, the model, and the messages between them."""
