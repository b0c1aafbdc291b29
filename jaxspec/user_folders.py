"""Where files of the user lie that jaxspec makes: by the XDG specification, or as macOS has it."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """For what can be made again.

    Raises:
        RuntimeError: the user has no home, or one without an absolute path.
    """
    return _folder("XDG_CACHE_HOME", ".cache", "Library/Caches")


def state_folder() -> Path:
    """For what tells of the past.

    Raises:
        RuntimeError: as `cache_folder`.
    """
    return _folder("XDG_STATE_HOME", ".local/state", "Library/Logs")


def _folder(variable: str, usual: str, on_macos: str) -> Path:
    if sys.platform == "darwin":
        base = Path.home() / on_macos
    else:
        base = Path(os.environ.get(variable) or Path.home() / usual)
    if not base.is_absolute():
        raise RuntimeError(f"The user's folder has no absolute path: {str(base)!r:.300}.")
    return base / "jaxspec"
