"""Entry point of the `trinity` command. Ctrl-C exits quietly with 130, as shells expect, even during imports."""

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

    # During imports KeyboardInterrupt would be raised inside third-party modules, some of which print it or turn it
    # into an ImportError. Nothing needs cleanup yet, so exit directly. (If SIGINT is ignored, it stays ignored.)
    python_handler = signal.getsignal(signal.SIGINT)
    if python_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    from launchers.main import main as run

    signal.signal(signal.SIGINT, python_handler)
    run()


if __name__ == "__main__":
    main()
