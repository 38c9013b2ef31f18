import multiprocessing.forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def _forkserver_is_running() -> None:
    """It keeps descriptors of its own from its start on, which no leak check shall count."""
    multiprocessing.forkserver.ensure_running()
