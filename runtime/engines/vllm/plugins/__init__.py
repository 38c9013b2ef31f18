"""Plugins that run inside vLLM's processes, with vLLM's interpreter: they cannot import Trinity.

This folder is on vLLM's path, so that its own options load a connector by module name; vLLM is not patched.
"""
