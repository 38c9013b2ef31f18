"""Llama's network, written for a paged KV cache: layers and attention in torch, on a CPU with loops of our own."""
