"""The options of `trinity demo` and their limits.

Standard library alone: `launchers.bootstrap` reads them before anything is installed."""

import argparse
from collections.abc import Callable

BUILT_IN_QUESTIONS = (
    "How does a with statement call __exit__?",
    "What is the difference between is and == in Python?",
    "When does a finally clause run?",
    "What does the yield expression do in a generator?",
)


def demo_parser(program: str) -> argparse.ArgumentParser:
    """What `trinity demo` takes."""
    parser = argparse.ArgumentParser(
        program,
        description="Build an index of Python's reference, start a node on this machine, ask it, and show where the "
        "time went.",
        allow_abbrev=False,
    )

    def number(name: str, default: int, least: int, most: int, help: str) -> None:
        limits = f"[{least} to {most}; default: {default}]"
        parser.add_argument(name, type=_within(least, most), default=default, metavar="N", help=f"{help} {limits}")

    def flag(name: str, help: str) -> None:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=False, help=help)

    number("--questions", 3, 0, len(BUILT_IN_QUESTIONS), "How many of the built-in questions to ask.")
    number("--max-tokens", 96, 1, 1024, "Tokens an answer may have.")
    number("--every-tokens", 0, 0, 1024, "Ask the pool again after so many tokens; 0: never.")
    number("--port", 0, 0, 65535, "HTTP port; 0 takes a free one.")
    parser.add_argument(
        "--ask", action="append", default=[], metavar="TEXT",
        help="A question of your own (may be given more than once).",
    )  # fmt: skip
    flag("--keep", "Leave the node up and print how to ask it.")
    flag("--check", "Compare 50 greedy answers, with weights in float32, with transformers' generate() in one process.")
    return parser


def _within(least: int, most: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)  # argparse says so of what is none
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is outside {least}..{most}")
        return value

    return integer
