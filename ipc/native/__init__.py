"""The native layer of all compiled packages: compiler, records, views of memory, atomics and intrinsics."""
