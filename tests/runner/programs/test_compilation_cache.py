"""Compiled programs are kept where the user expects them."""

from pathlib import Path

import jax
import pytest
from jax._src.compiler import get_compile_options

from jaxspec.runner.programs.compilation_cache import enable_compilation_cache


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_default_lies_in_the_users_cache_folder(no_cache_yet):
    folder = enable_compilation_cache()
    assert folder.is_relative_to(no_cache_yet) and "jaxspec" in folder.parts
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_a_cache_the_user_set_up_is_kept_unless_another_is_given(no_cache_yet):
    own = no_cache_yet / "own"
    jax.config.update("jax_compilation_cache_dir", str(own))
    assert enable_compilation_cache() == own
    assert enable_compilation_cache(no_cache_yet / "given") == no_cache_yet / "given"


def test_what_xlas_autotuner_found_is_kept_too(no_cache_yet):
    """JAX's own default, and the tests see that it stays so: else a changed program tunes anew."""
    folder = enable_compilation_cache()
    options = get_compile_options(num_replicas=1, num_partitions=1).executable_build_options
    tuned = Path(options.debug_options.xla_gpu_per_fusion_autotune_cache_dir)
    assert tuned.parent == folder
