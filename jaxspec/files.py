"""Reading of untrusted checkpoint files within bounds, and folders for caches and state."""

import collections
import json
import os
import stat
import sys
import tempfile
from io import FileIO
from pathlib import Path
from typing import Any

from jaxspec.checks import shown

MAX_JSON_BYTES = 2**24
"""Largest JSON file that is read, about ten times the largest of published models."""
# How the text begins that Git LFS leaves instead of a file (its specification, docs/spec.md).
_POINTERS = (
    b"version https://git-lfs.github.com/spec/",
    b"version https://hawser.github.com/spec/",
)
_MAX_POINTER_BYTES = 1024


def open_file(path: Path) -> FileIO:
    """Open the regular file at `path`, following links, for unbuffered reading.

    Other files are refused: a named pipe could wait for a writer forever, and a device could be
    endless.

    Raises:
        FileNotFoundError: there is no file, or only a dangling link.
        ValueError: the file can't be opened, is not a regular file, or is a pointer of Git LFS.
    """
    try:
        file = FileIO(path, opener=_without_waiting)
    except FileNotFoundError as error:
        state = "is a link to nothing" if os.path.islink(path) else "is absent"
        raise FileNotFoundError(
            f"{path} must be a file, and {state}. Download it again."
        ) from error
    except (OSError, ValueError) as error:  # ValueError for a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path} must be a file that can be read, but opening it failed: {reason}. Check its "
            "permissions, or download it again."
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(
            f"{path} must be a regular file, and is a pipe, a socket or a device. Download the "
            "file itself."
        )
    if _is_pointer(file):
        file.close()
        raise ValueError(
            f"{path} is a Git LFS pointer, a short text in place of the file. Run `git lfs pull` "
            "in its repository, or download the file itself."
        )
    return file


def _is_pointer(file: FileIO) -> bool:
    if os.fstat(file.fileno()).st_size > _MAX_POINTER_BYTES:
        return False
    try:
        return os.pread(file.fileno(), len(_POINTERS[0]), 0).startswith(_POINTERS)
    except OSError:
        return False  # reading it will fail, too


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag


def fill(file: FileIO, buffer: memoryview, start: int = 0) -> None:
    """Fill `buffer` with the bytes of the file from offset `start` on.

    Several threads may read the same file, because the file position is not used.

    Raises:
        ValueError: the file is too short, or reading fails.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(file.fileno(), [buffer[done:]], start + done)
        except OSError as error:
            raise ValueError(
                f"{file.name} must be a file that can be read, but reading it failed: "
                f"{error.strerror}. Copy it to another disk, or download it again."
            ) from error
        if not count:
            raise ValueError(
                f"{file.name} must stay as it is while it is read, and it was cut short. Load the "
                "model again when nothing writes to it, or download it again."
            )
        done += count


def writable_folder(name: str, purpose: str, mode: int = 0o777) -> Path:
    """Return the folder `name` after a test write; create it with `mode` if its parent exists.

    Args:
        name: Path of the folder, in which `~` is expanded.
        purpose: Beginning of the error message, such as "Hidden states are saved to".
        mode: Permissions of a new folder.

    Raises:
        ValueError: it can't be created, is a file, or is not writable.
    """
    folder = Path(name).expanduser().absolute()
    try:
        folder.mkdir(mode, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError for a user without a home
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{purpose} a folder in which files can be written, and {shown(name)} is none: "
            f"{reason}. Make it first, with its parents, or name another."
        ) from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file at `path`.

    Raises:
        FileNotFoundError: as in `open_file`.
        ValueError: as in `open_file` and `parse_json`, or the file exceeds `MAX_JSON_BYTES`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(
                f"{path} must be JSON of at most {MAX_JSON_BYTES:,} bytes, got {size:,}. Download "
                "it again."
            )
        content = bytearray(size)
        fill(file, memoryview(content))
    return parse_json(content, str(path))


def parse_json(content: bytes | bytearray, source: str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8; `source` names it in errors.

    Raises:
        ValueError: `content` is not a JSON object, an object has a duplicate name, or the nesting
            exceeds Python's recursion limit.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(
            f"{source} must be JSON, and is nested too deeply to be that of a model. Download it "
            "again."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{source} must be JSON, and is not: {error}. Download it again."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{source} must hold a JSON object, got {type(value).__name__}. Download it again."
        )
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):  # JSON readers differ in which duplicate they use
        ((name, count),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the name {shown(name)} {count} times")
    return content


def cache_folder() -> Path:
    """Return the user's folder for files that can be regenerated.

    Raises:
        RuntimeError: the user has no home, or the folder has no absolute path.
    """
    return _folder("XDG_CACHE_HOME", ".cache", "Library/Caches")


def state_folder() -> Path:
    """Return the user's folder for records of past runs.

    Raises:
        RuntimeError: as in `cache_folder`.
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
