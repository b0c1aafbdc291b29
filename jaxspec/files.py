"""Files of a checkpoint, which anybody may have written: opened and read within bounds."""

import collections
import json
import os
import stat
import tempfile
from io import FileIO
from pathlib import Path
from typing import Any

from jaxspec.checks import shown

MAX_JSON_BYTES = 2**24
"""The longest JSON text that is read: some ten times that of the largest published models."""


def open_file(path: Path) -> FileIO:
    """The regular file at `path`, or that a link there names, to be read without a buffer.

    A named pipe would wait for a writer for ever, and a device may have no end.

    Raises:
        FileNotFoundError: there is no file, or the link leads to none.
        ValueError: it may not be opened, or is no regular file.
    """
    try:
        file = FileIO(path, opener=_without_waiting)
    except FileNotFoundError as error:
        state = "is a link to nothing" if os.path.islink(path) else "is absent"
        raise FileNotFoundError(
            f"{path} must be a file, and {state}. Download it again."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
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
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag


def fill(file: FileIO, buffer: memoryview, start: int = 0) -> None:
    """Read the file's bytes from `start` on until `buffer` is full.

    Several threads may do so at once: where the file itself stands plays no part.

    Raises:
        ValueError: the file ends before, or the disk fails.
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
    """The folder that files shall lie in, made with `mode` if only its last part is missing.

    `purpose`: what an error begins with, such as "Hidden states are saved to".

    Raises:
        ValueError: it can't be made, is a file, or no file can be written there.
    """
    folder = Path(name).expanduser().absolute()
    try:
        folder.mkdir(mode, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user's home
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{purpose} a folder in which files can be written, and {shown(name)} is none: "
            f"{reason}. Make it first, with its parents, or name another."
        ) from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        FileNotFoundError: as `open_file`.
        ValueError: as `open_file` and `parse_json`, or the file is longer than `MAX_JSON_BYTES`.
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
    """The JSON object that `content`, of the `source`, is in UTF-8.

    Raises:
        ValueError: it is not JSON or no object, an object gives a name twice, or objects and lists
            are nested more deeply than Python can follow.
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
    if len(content) < len(pairs):  # readers differ in which of the two they take
        ((name, count),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the name {shown(name)} {count} times")
    return content
