"""Compiled programs are kept where the user expects them."""

import jax
import pytest

from jaxspec.runner.compilation_cache import enable_compilation_cache


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
