"""Options of the test command."""

import pytest

from tests.fuzz import budget


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-examples", type=int, default=budget.USUAL, help="examples that each test of tests/fuzz tries"
    )


def pytest_configure(config: pytest.Config) -> None:
    budget.examples = config.getoption("--fuzz-examples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if budget.examples > budget.USUAL:  # the long form takes as long as it takes
        for item in items:
            if "tests/fuzz/" in item.nodeid:
                item.add_marker(pytest.mark.timeout(0))
