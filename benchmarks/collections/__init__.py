"""Collections measured, alone, beside writes, and under kills: `python -m benchmarks.collections`."""
