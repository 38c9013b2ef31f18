"""What is looked at before a node starts: its needs, its machine, its GPUs' memory between processes."""
