"""Files of pieces: what is written of one, what is read again, and which a folder has.

All of it runs in the thread of a `DiskTier`. A file is a container of the piece's arrays, with the
keys of its pages. Whatever is wrong with one, its reader hears of it by an error.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.handover.container import Container
from jaxspec.piece_plan import Piece
from jaxspec.scheduler.piece_index import Key

KIND = "piece of kept prefixes"
Like = Sequence[tuple[tuple[int, ...], np.dtype]]
"""Shape and dtype of each array of a piece."""
_NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{32}\.piece")
_PART = re.compile(r"\.\w+\.piece\.part")  # `Container.save` writes it, and renames it
_MAX_KEYS = 2**12


class PieceFile(NamedTuple):
    """A file that was found or written."""

    name: str
    num_bytes: int
    is_state: bool
    keys: tuple[Key, ...]


def write(path: Path, piece: Piece, keys: Sequence[Key]) -> int:
    """Write a piece; the bytes of its file.

    Raises:
        OSError: it can't be written.
    """
    arrays = {str(index): np.asarray(array) for index, array in enumerate(piece.arrays or ())}
    told = [[before.hex(), list(tokens)] for before, tokens in keys]
    Container(KIND, {"is_state": piece.is_state, "keys": told}, arrays).save(path)
    return path.stat().st_size


def read(path: Path, like: Like) -> tuple[np.ndarray, ...]:
    """The arrays of a piece.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds something else.
    """
    arrays = Container.load(path, KIND).arrays
    found = tuple(arrays[str(index)] for index in range(len(arrays)))
    if [(array.shape, array.dtype) for array in found] != list(like):
        raise ValueError(f"{path} must hold the arrays of a piece of this engine, and has others.")
    os.utime(path)  # it was used now, also for the next engine
    return found


def scan(folder: Path, own: str, page_size: int) -> list[PieceFile]:
    """The files of pieces whose names begin with `own`, those first that were used longest ago.

    Other files of pieces are deleted, and so are parts that a killed process has left.
    """
    found = []
    for entry in os.scandir(folder):
        path, name = Path(entry.path), _NAME.fullmatch(entry.name)
        if _PART.fullmatch(entry.name):
            _delete(path)
        if name is None:
            continue  # no file of ours
        try:
            if name[1] != own:
                raise ValueError("it is of another model, or of other sizes")
            status, about = path.stat(), Container.about_of(path, KIND)
            keys = tuple(Key(bytes.fromhex(b), tuple(map(int, t))) for b, t in about["keys"])
            if not 0 < len(keys) <= _MAX_KEYS or max(len(k.tokens) for k in keys) > page_size:
                raise ValueError("it has no such pages")
            file = PieceFile(entry.name, status.st_size, about["is_state"] is True, keys)
            found.append((status.st_mtime_ns, file))
        except (OSError, ValueError, TypeError, KeyError):
            _delete(path)
    return [file for _, file in sorted(found, key=lambda each: each[0])]


def _delete(path: Path) -> None:
    """Delete a file of no use, if that can be done."""
    with contextlib.suppress(OSError):
        path.unlink()


def delete_all(folder: Path, own: str) -> None:
    """Delete the files of pieces whose names begin with `own`."""
    for path in folder.glob(f"{own}-*.piece"):
        path.unlink(missing_ok=True)
