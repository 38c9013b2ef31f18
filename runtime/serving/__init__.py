"""The path of a request: frontend, prefill, decode, the model they run, and what they say to each other."""
