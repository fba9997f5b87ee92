"""The `--full` option: the same tests over wider grids. Programs that compile fast, and no process that holds too many of them."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import jax
import pytest

# Each compiled program maps some memory, and Linux lets a process have 65,530 maps: beyond that XLA's compiler crashes. A single test over
# a full grid makes up to 10,000 of them, a second of compiling about 100.
_MAX_MAPS, _SECONDS_BETWEEN_CHECKS = 25_000, 2.0
_MAPS = Path("/proc/self/maps")
# JAX's own variable, and in small letters its option.
_FAST_COMPILES = "JAX_DISABLE_MOST_OPTIMIZATIONS"
_last_check = [time.monotonic()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests over their full grids, as CI does; minutes rather than seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles fast, since compiling takes most of the tests' time, unless the environment has a word on it. With --full as users do.

    Triton kernels are interpreted where no test needs a GPU; whoever imports triton first decides that for a process.
    """
    if "not gpu" in config.option.markexpr:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if not config.getoption("--full") and "not gpu" in config.option.markexpr and _FAST_COMPILES not in os.environ:
        jax.config.update(_FAST_COMPILES.lower(), True)
        os.environ[_FAST_COMPILES] = "1"  # for the processes that tests start


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
    if time.monotonic() - _last_check[0] < _SECONDS_BETWEEN_CHECKS or not _MAPS.exists():
        return
    _last_check[0] = time.monotonic()
    if _MAPS.read_bytes().count(b"\n") > _MAX_MAPS:
        jax.clear_caches()
        gc.collect()
