"""The options of `trinity demo` and their limits.

Standard library alone: `launchers.bootstrap` reads them before anything is installed."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

BUILT_IN_QUESTIONS = (
    "How does a with statement call __exit__?",
    "What is the difference between is and == in Python?",
    "When does a finally clause run?",
    "What does the yield expression do in a generator?",
)
DESCRIPTION = (
    "Build an index of Python's reference, start a node on this machine, ask it, and show where the time went."
)
ASK = "A question of your own (may be given more than once)."
KEEP = "Leave the node up and print how to ask it."
CHECK = "Compare 50 greedy answers with transformers' generate() in one process."


@dataclass(frozen=True)
class Number:
    """An option that takes an integer, least..most."""

    default: int
    least: int
    most: int
    help: str


QUESTIONS = Number(3, 0, len(BUILT_IN_QUESTIONS), "How many of the built-in questions to ask.")
MAX_TOKENS = Number(96, 1, 1024, "Tokens an answer may have.")
EVERY_TOKENS = Number(0, 0, 1024, "Ask the pool again after so many tokens; 0: never.")
PORT = Number(0, 0, 65535, "HTTP port; 0 takes a free one.")


def demo_parser(program: str) -> argparse.ArgumentParser:
    """What `trinity demo` takes."""
    parser = argparse.ArgumentParser(program, description=DESCRIPTION, allow_abbrev=False)
    numbers = {"questions": QUESTIONS, "max-tokens": MAX_TOKENS, "every-tokens": EVERY_TOKENS, "port": PORT}
    for name, number in numbers.items():
        limits = f"[{number.least} to {number.most}; default: {number.default}]"
        parser.add_argument(
            f"--{name}", type=_within(number), default=number.default, metavar="N", help=f"{number.help} {limits}"
        )
    parser.add_argument("--ask", action="append", metavar="TEXT", help=ASK)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=False, help=KEEP)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=False, help=CHECK)
    return parser


def _within(number: Number) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)  # argparse says so of what is none
        if not number.least <= value <= number.most:
            raise argparse.ArgumentTypeError(f"{value} is outside {number.least}..{number.most}")
        return value

    return integer
