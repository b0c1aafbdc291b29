"""Keeps compiled programs on disk, so that the second start is quick."""

import os
import sys
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable_compilation_cache(folder: str | Path | None = None) -> Path:
    """Turn JAX's persistent compilation cache on and return its folder.

    A cache the user has set up (`JAX_COMPILATION_CACHE_DIR` or `jax.config`) is kept unless
    `folder` is given; otherwise it lies in the user's cache folder.
    """
    own = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if own and (folder is None or str(folder) == own):
        return Path(own)
    chosen = folder or _default_folder()
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    compilation_cache.reset_cache()  # JAX opens a cache once
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(chosen)


def _default_folder() -> Path:
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "jaxspec" / f"xla-{jax.__version__}"
