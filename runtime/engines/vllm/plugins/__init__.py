"""What runs inside vLLM's processes, with vLLM's interpreter: nothing of Trinity can be imported there.

This folder is on their path, so that vLLM finds a connector by its module's name; unpatched, by its own options.
"""
