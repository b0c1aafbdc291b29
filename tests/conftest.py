"""Strict dtypes and ranks, exact fp32 products on a GPU too, and compiled programs kept on disk."""

import gc

import jax
import pytest

from jaxspec.pallas import dispatch
from jaxspec.runner.compilation_cache import enable_compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
enable_compilation_cache()


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU with kernels where there is none."""
    _, missing = dispatch.kernels_here()
    if missing is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_file():
    """XLA maps some dozen pieces of memory a program; beyond 65,530 of them it aborts."""
    yield
    jax.clear_caches()
    gc.collect()
