"""Checkpoint: a model's stored tensors, read piece by piece; safetensors folders."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxspec.checks import shown
from jaxspec.files import read_json
from jaxspec.models.safetensors_file import SafetensorsFile, StoredTensor

INDEX = "model.safetensors.index.json"
_BESIDE_THE_INDEX = re.compile(r"[^/\\\0]+\.safetensors")
_NAMED = 4  # tensors or files listed per problem in an error message
_NAME_CHARACTERS = 100


class Checkpoint(Protocol):
    """Tensors by their names in the checkpoint, in any file format. A context manager."""

    @property
    def path(self) -> Path:
        """The folder or file with the tensors."""
        ...

    @property
    def asked_by(self) -> str:
        """Name of the part that defines the model's tensors, such as "config.json", for errors."""
        ...

    @property
    def remedy(self) -> str:
        """Sentence for errors on how to fix tensors that do not match."""
        ...

    def __enter__(self) -> "Checkpoint": ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def names(self) -> frozenset[str]: ...

    def files_of(self, name: str) -> list[str]:
        """Return the names of the files that hold a tensor: one, in a valid checkpoint."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor's shape, and the dtype that `read` returns."""
        ...

    def bytes_by_type(self) -> Mapping[str, int]:
        """Return the stored bytes of all tensors by storage type."""
        ...

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[elements]`, with a tensor's elements from `first` on, in C order.

        `into` must have the dtype of `stored`. Threads may read concurrently.

        Raises:
            ValueError: The file was truncated after it was opened.
        """

    def check_unchanged(self) -> None:
        """Raise ValueError if a file was written to after it was opened."""


class SafetensorsCheckpoint:
    """The `Checkpoint` in a folder of safetensors files.

    Reads `model.safetensors.index.json` and its shards, or without an index all
    `model*.safetensors`.
    """

    asked_by = "config.json"
    remedy = "Check that config.json belongs to these weights, or download both again."

    def __init__(self, folder: Path):
        """Open all files and read their headers.

        Raises:
            FileNotFoundError: There are no weights, or a file in the index is missing.
            ValueError: A file is damaged, or the index does not match the files.
        """
        self.path = folder
        self._holders: dict[str, list[SafetensorsFile]] = {}  # tensor -> files with it
        index = read_index(folder)
        paths = _unindexed(folder) if index is None else _indexed(folder, index)
        with contextlib.ExitStack() as opened:
            self._files = [
                opened.enter_context(contextlib.closing(SafetensorsFile(path))) for path in paths
            ]
            for file in self._files:
                for name in file.tensors:
                    self._holders.setdefault(name, []).append(file)
            self._check_index(index or {})
            self._open_files = opened.pop_all()

    def __enter__(self) -> "SafetensorsCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._holders)

    def files_of(self, name: str) -> list[str]:
        return [file.path.name for file in self._holders[name]]

    def stored(self, name: str) -> StoredTensor:
        return self._holders[name][0].tensors[name]

    def bytes_by_type(self) -> Mapping[str, int]:
        num_bytes: Counter[str] = Counter()
        for name in self.names:
            stored = self.stored(name)
            num_bytes[stored.dtype] += stored.num_bytes
        return num_bytes

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """See `Checkpoint.read`; dtypes are those that `SafetensorsFile.read` accepts."""
        self._holders[name][0].read(name, first, into)

    def check_unchanged(self) -> None:
        for file in self._files:
            file.check_unchanged()

    def _check_index(self, index: Mapping[str, str]) -> None:
        """Raise ValueError if the index places tensors in files that lack them."""
        misplaced = [
            f"{name} (in {file})"
            for name, file in sorted(index.items())
            if name not in self._holders or file not in self.files_of(name)
        ]
        if misplaced:
            raise ValueError(
                f"{self.path / INDEX} must name the file that holds a tensor, and these are "
                f"not where it says: {listed(misplaced)}. Download the index and the files again."
            )


def listed(names: list[str], characters: int = _NAME_CHARACTERS) -> str:
    """Return the first few of `names`, shortened, and the number of others, for error messages."""
    first = ", ".join(_plain(name, characters) for name in names[:_NAMED])
    return f"{first} and {len(names) - _NAMED:,} more" if len(names) > _NAMED else first


def _plain(name: str, characters: int) -> str:
    """Escape control characters in a name and shorten it."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= characters else f"{name[:characters]}..."


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor from the folder's index; None if there is no index.

    Raises:
        ValueError: The index is damaged, or names files outside its folder.
    """
    path = folder / INDEX
    if not os.path.lexists(path):
        return None
    index = read_json(path).get("weight_map")
    if not index or not isinstance(index, dict):
        raise ValueError(
            f"{path} must map tensor names to files under `weight_map`, and does not. Download it "
            "again."
        )
    for name, file in index.items():
        if not isinstance(file, str) or not _BESIDE_THE_INDEX.fullmatch(file):
            raise ValueError(
                f"{path} must name .safetensors files that lie beside it, and puts {shown(name)} "
                f"in {shown(file)}. Download it again."
            )
    return index


def _indexed(folder: Path, index: Mapping[str, str]) -> list[Path]:
    names = sorted(set(index.values()))
    if absent := [name for name in names if not os.path.lexists(folder / name)]:
        raise FileNotFoundError(
            f"{folder} must hold every file that {INDEX} names, and lacks {listed(absent)}. "
            "Download what is missing."
        )
    return [folder / name for name in names]


def _unindexed(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        pickled = any(folder.glob("pytorch_model*.bin"))
        raise FileNotFoundError(
            f"{folder} must hold model.safetensors, or {INDEX} with its shards, and "
            + (
                "has only pytorch_model.bin, which jaxspec does not read. Download the safetensors "
                "files, or convert it with save_pretrained of transformers."
                if pickled
                else "has neither. Download the safetensors files."
            )
        )
    return paths
