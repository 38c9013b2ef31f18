"""Options of `trinity demo` and their limits.

Uses the standard library alone: `launchers.bootstrap` parses them before installation.
"""

import argparse
from collections.abc import Callable

BUILT_IN_QUESTIONS = (
    "How does a with statement call __exit__?",
    "What is the difference between is and == in Python?",
    "When does a finally clause run?",
    "What does the yield expression do in a generator?",
)


def demo_parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of `trinity demo`."""
    parser = argparse.ArgumentParser(
        program,
        description="Build an index of Python's reference, start a node on this machine, ask it questions, and show "
        "the stage times.",
        allow_abbrev=False,
    )

    def number(name: str, default: int, low: int, high: int, help: str) -> None:
        limits = f"[{low} to {high}; default: {default}]"
        parser.add_argument(name, type=_within(low, high), default=default, metavar="N", help=f"{help} {limits}")

    number("--questions", 3, 0, len(BUILT_IN_QUESTIONS), "Number of built-in questions to ask.")
    number("--max-tokens", 96, 1, 1024, "Maximum tokens per answer.")
    number("--every-tokens", 0, 0, 1024, "Tokens between probes of the pool; 0 disables them.")
    number("--port", 0, 0, 65535, "HTTP port; 0 selects a free port.")
    parser.add_argument(
        "--ask", action="append", default=[], metavar="TEXT",
        help="Ask this question (repeatable).",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="Keep the node running and print example requests.")
    return parser


def _within(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)  # argparse reports a ValueError
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is outside {low}..{high}")
        return value

    return integer
