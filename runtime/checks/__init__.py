"""Checks before a node starts: configuration, machine, memory, and CUDA IPC between processes."""
