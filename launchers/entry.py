"""Where the `trinity` command begins: Ctrl-C ends it quietly, with 130 as shells expect, also while it is importing."""

import sys

_INTERRUPTED = 130


def main() -> None:
    """Import and run the command line."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _run() -> None:
    import os
    import signal

    # KeyboardInterrupt would be raised inside other people's modules, some of which print it, or turn it into an
    # ImportError. Nothing is begun yet, so there is nothing to end in order. (Where it is ignored it stays ignored.)
    python_handler = signal.getsignal(signal.SIGINT)
    if python_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    from launchers.main import main as run

    signal.signal(signal.SIGINT, python_handler)
    run()


if __name__ == "__main__":
    main()
