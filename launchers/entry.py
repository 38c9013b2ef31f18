"""Where the `trinity` command begins: Ctrl-C ends it without a traceback even while it is still importing."""

import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from launchers.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
