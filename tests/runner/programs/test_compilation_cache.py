"""Compiled programs are kept where the user expects them, and where nobody else can write."""

import errno
import math
import os
import pwd
import stat
import tempfile
import time
import warnings
from pathlib import Path

import jax
import pytest
from jax._src.compiler import get_compile_options
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.runner.programs.compilation_cache import enable_compilation_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_default_lies_in_the_users_cache_folder(no_cache_yet):
    folder = enable_compilation_cache()
    assert folder.is_relative_to(no_cache_yet) and "jaxspec" in folder.parts
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


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


def refused(folder=None, match="kept nowhere"):
    """Nothing is kept: one warning says so, with the way out, and the start goes on."""
    with pytest.warns(UserWarning, match=match) as said:
        assert enable_compilation_cache(folder) is None
    (message,) = {str(one.message) for one in said}
    assert "Name another folder in the option compilation_cache" in message
    assert len(message) < 800
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("bits", [0o775, 0o777])
@pytest.mark.parametrize("named_by", ["option", "JAX", "default"])
def test_a_folder_that_others_can_write_is_refused_whoever_named_it(no_cache_yet, named_by, bits):
    folder = no_cache_yet / "jaxspec" / f"xla-{jax.__version__}"
    folder.mkdir(parents=True, mode=0o700)
    folder.chmod(bits)
    if named_by == "JAX":
        jax.config.update("jax_compilation_cache_dir", str(folder))
    refused(folder if named_by == "option" else None, match="Other users can write")


def test_files_that_others_can_write_are_refused(no_cache_yet):
    folder = enable_compilation_cache()
    folder.chmod(0o755)
    (folder / "jit_step-cache").write_bytes(b"a program")
    (folder / "jit_step-cache").chmod(0o666)
    refused(match="jit_step-cache' can be written by other users")


@pytest.mark.parametrize("home", [None, "relative"])
def test_an_account_without_a_home_starts(no_cache_yet, home, monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.chdir(no_cache_yet)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    refused()
    assert os.listdir(no_cache_yet) == []


@pytest.mark.parametrize("name", ["file", "file/cache", "link", "a\0b", "x" * 300])
def test_a_folder_that_cannot_be_made_stops_no_start(no_cache_yet, name):
    (no_cache_yet / "file").write_text("here")
    (no_cache_yet / "link").symlink_to("nowhere")
    refused(f"{no_cache_yet}/{name}")


def test_a_folder_on_a_read_only_disk_stops_no_start(no_cache_yet, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", fails)
    refused(match="Read-only file system")


def test_programs_are_read_where_no_more_can_be_written(no_cache_yet, monkeypatch):
    """As in a container's image; or the disk is full."""

    def fails(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", fails)
    with pytest.warns(UserWarning, match="no new ones are kept.*No space left") as said:
        folder = enable_compilation_cache()
    assert len(said) == 1
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == math.inf
    options = get_compile_options(num_replicas=1, num_partitions=1).executable_build_options
    assert options.debug_options.xla_gpu_per_fusion_autotune_cache_dir == ""


def test_the_warning_is_shown_once(no_cache_yet):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            enable_compilation_cache("a\0b")
    assert len(shown) == 1


def test_a_url_is_left_to_jax(no_cache_yet):
    enable_compilation_cache("gs://bucket/programs")
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/programs"


def test_nothing_is_made_where_jaxs_cache_is_turned_off(no_cache_yet):
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compilation_cache() is None
    assert enable_compilation_cache("a\0b") is None
    assert os.listdir(no_cache_yet) == []


def test_checking_a_thousand_programs_takes_no_noticeable_time(no_cache_yet):
    folder = enable_compilation_cache()
    for number in range(1000):
        (folder / f"jit_step-{number}-cache").touch()
    begin = time.process_time()
    enable_compilation_cache()
    assert time.process_time() - begin < 0.5  # 0.01 s on a quiet machine
