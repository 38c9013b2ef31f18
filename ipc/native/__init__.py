"""The compiler of both compiled packages, `ipc` and `gpu`."""
