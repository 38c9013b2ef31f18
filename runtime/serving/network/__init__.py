"""Llama network over a paged KV cache: layers and attention in torch, with compiled kernels on CPUs."""
