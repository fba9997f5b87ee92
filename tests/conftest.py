"""The `--full` option: the same tests over wider grids. And no process that holds too many compiled programs."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import jax
import pytest

# Each compiled program maps some memory, and Linux lets a process have 65,530 maps: beyond that XLA's compiler crashes.
_MAX_MAPS, _TESTS_BETWEEN_CHECKS = 30_000, 8
_MAPS = Path("/proc/self/maps")
_num_tests = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests over their full grids, as CI does; minutes rather than seconds")


@pytest.fixture(scope="session")
def full_grid(request: pytest.FixtureRequest) -> bool:
    """Whether a test that loops over a grid should take all of it. See also `pytest.mark.full`, for parametrized cases."""
    return bool(request.config.getoption("--full"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `full`, unless asked for."""
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drops all compiled programs where there are too many of them. Tests share them, so not more often than that."""
    if next(_num_tests) % _TESTS_BETWEEN_CHECKS == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MAX_MAPS:
        jax.clear_caches()
        gc.collect()
