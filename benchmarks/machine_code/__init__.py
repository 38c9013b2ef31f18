"""Instruction counts of the kernels' machine code, static and executed, without a GPU."""
