"""The ranks of the tests of this folder are forked from a server, which imports what they need while other tests run."""

from multiprocessing.forkserver import ensure_running

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any("run_grid" in vars(item.module) for item in items if isinstance(item, pytest.Function)):
        ensure_running()
