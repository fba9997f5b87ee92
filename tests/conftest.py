"""The `--full` option: the same tests over wider grids."""

from __future__ import annotations

import pytest


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
