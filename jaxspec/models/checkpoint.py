"""Checkpoint: the tensors that a model is made of, as they were published, read part by part."""

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
_NAMED = 4  # tensors or files of a kind that an error names
_NAME_CHARACTERS = 100


class Checkpoint(Protocol):
    """Published tensors by name, whatever the files. A context manager, which closes these."""

    @property
    def path(self) -> Path:
        """The folder or the file that holds the tensors."""
        ...

    @property
    def asked_by(self) -> str:
        """What there says which tensors a model has, in words, such as "config.json"."""
        ...

    @property
    def remedy(self) -> str:
        """What to do where these are others, a sentence."""
        ...

    def __enter__(self) -> "Checkpoint":
        """The checkpoint itself."""
        ...

    def __exit__(self, *error: object) -> None:
        """Close the files."""

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's published name."""
        ...

    def files_of(self, name: str) -> list[str]:
        """The names of the files that hold a tensor: one, in a sound checkpoint."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """A tensor's shape, and the dtype that `read` gives."""
        ...

    def bytes_by_type(self) -> Mapping[str, int]:
        """The bytes of all tensors in the files, by the type that they are stored in."""
        ...

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[elements]`, with a tensor's elements from `first` on, in C order.

        It must have the dtype that `stored` says. Several threads may read at once.

        Raises:
            ValueError: the file was cut short since it was opened.
        """

    def check_unchanged(self) -> None:
        """ValueError if a file was written to since it was opened."""


class SafetensorsCheckpoint:
    """The tensors in a folder's safetensors files: a `Checkpoint`.

    Reads `model.safetensors.index.json` and its shards, or else every `model*.safetensors`.
    """

    asked_by = "config.json"
    remedy = "Check that config.json belongs to these weights, or download both again."

    def __init__(self, folder: Path):
        """Open every file and read its header.

        Raises:
            FileNotFoundError: there are no weights, or not all that the index names.
            ValueError: a file is damaged, or the index does not fit the files.
        """
        self.path = folder
        self._holders: dict[str, list[SafetensorsFile]] = {}  # tensor -> files that hold it
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
        """The checkpoint itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self._open_files.close()

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's published name."""
        return frozenset(self._holders)

    def files_of(self, name: str) -> list[str]:
        """The names of the files that hold a tensor: one, in a sound checkpoint."""
        return [file.path.name for file in self._holders[name]]

    def stored(self, name: str) -> StoredTensor:
        """A tensor's dtype and shape, from the file's header."""
        return self._holders[name][0].tensors[name]

    def bytes_by_type(self) -> Mapping[str, int]:
        """The bytes of all tensors, by the dtype that the headers say."""
        num_bytes: Counter[str] = Counter()
        for name in self.names:
            stored = self.stored(name)
            num_bytes[stored.dtype] += stored.num_bytes
        return num_bytes

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[elements]`, with a tensor's elements from `first` on, in C order.

        It must have the tensor's own dtype, of `safetensors_file.DTYPES` or `INTEGERS`. Several
        threads may read at once.

        Raises:
            ValueError: its file was cut short since it was opened.
        """
        self._holders[name][0].read(name, first, into)

    def check_unchanged(self) -> None:
        """ValueError if a file was written to since it was opened."""
        for file in self._files:
            file.check_unchanged()

    def _check_index(self, index: Mapping[str, str]) -> None:
        """Refuse an index that puts tensors in files that lack them."""
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


def listed(names: list[str]) -> str:
    """The first of the `names`, and how many more there are: as an error names tensors."""
    first = ", ".join(map(_plain, names[:_NAMED]))
    return f"{first} and {len(names) - _NAMED:,} more" if len(names) > _NAMED else first


def _plain(name: str) -> str:
    """A name without what a terminal would obey, and not too long."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}..."


def read_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by the folder's index; None where there is no index.

    Raises:
        ValueError: it is damaged, or names files that do not lie beside it.
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
