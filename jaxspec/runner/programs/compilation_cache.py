"""JAX's persistent compilation cache, in a folder that only the user can write."""

import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.files import cache_folder
from jaxspec.runner.programs.own_files import check_files, own_folder


def enable_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Enable JAX's persistent compilation cache.

    Args:
        folder: Folder or URL; None means the cache configured by the user
            (`JAX_COMPILATION_CACHE_DIR` or `jax.config`) or else one in the user's cache folder.

    Returns:
        The folder, or None if no program is cached: the user has disabled JAX's cache, or, with a
        warning, the folder can't be used. A folder that another user can write is refused
        (`own_files`); URLs are not checked.
    """
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    before = config.jax_compilation_cache_dir
    is_set_up = bool(before) and (folder is None or str(folder) == before)
    chosen = str(folder or before or "")
    is_url = "://" in chosen
    if not is_url:
        try:
            chosen = str(_checked(Path(chosen or _default_folder())))
        except (OSError, ValueError, RuntimeError) as error:
            _warn("Compiled programs are kept nowhere, so every start is a slow one", error)
            _use(None)
            return None
    if chosen != before:
        _use(chosen)
    if not is_set_up:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not is_url:
        _try_to_write(chosen)
    return Path(chosen)


def _default_folder() -> Path:
    return cache_folder() / f"xla-{jax.__version__}"


def _checked(folder: Path) -> Path:
    folder = own_folder(folder)
    check_files(folder)
    return folder


def _use(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # JAX would otherwise keep the open cache


def _try_to_write(folder: str) -> None:
    """Make the cache read-only, with a warning, if its folder can't be written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))  # a full disk may still allow empty files
    except OSError as error:
        _warn("Compiled programs are read, but no new ones are kept", error)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
        # XLA fails to compile programs if it can't write their autotuning results.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _warn(what: str, why: Exception) -> None:
    reason = f"{why!s:.500}".rstrip(".")
    # Python shows it only once, since the warning's line is always in this file.
    warnings.warn(
        f"{what}: {reason}. Name another folder in the option compilation_cache, or set "
        "JAX_ENABLE_COMPILATION_CACHE=0 to keep none.",
        stacklevel=2,
    )
