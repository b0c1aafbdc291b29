"""Strict dtypes and ranks, exact fp32 products on a GPU too, and compiled programs kept on disk."""

import gc
from pathlib import Path

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
def programs_compile_fast(request):
    """On a CPU, without most optimizations: most of the suite's time is XLA's, and this halves it.

    A module that wants them says `OPTIMIZED = True`.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    if jax.default_backend() == "cpu" and not getattr(request.module, "OPTIMIZED", False):
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def programs_do_not_pile_up():
    """XLA maps some dozen pieces of memory a program; beyond Linux's 65,530 a process aborts."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()  # what is needed again comes from disk
        gc.collect()
