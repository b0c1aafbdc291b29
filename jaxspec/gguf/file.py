"""GGUFFile: an open GGUF file, whose tensors are read piece by piece.

Tensors are read with system calls, not through a memory map: if a mapped file is truncated, a
signal kills the process.
"""

import os
from pathlib import Path

import numpy as np

from jaxspec.checks import shown
from jaxspec.files import fill, open_file
from jaxspec.gguf import package
from jaxspec.gguf.header import Tensor, read_header

_ELEMENTS = 2**18  # dequantised at once, to keep temporary arrays small


class GGUFFile:
    """An open GGUF file: its metadata and tensors. A context manager."""

    def __init__(self, path: Path):
        """Open the file and validate its header.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: As `read_header`, or the file is one part of a split model.
        """
        self.path = path
        self._file = open_file(path)
        try:
            self._state = self._now()
            self.metadata, self.tensors = read_header(self._file, self._state[0])
            self._check_unsplit()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read_raw(self, tensor: Tensor, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[elements]`, with a raw tensor's elements from `first` on.

        Threads may read concurrently.

        Raises:
            ValueError: The file was truncated after it was opened.
        """
        fill(self._file, into.view(np.uint8).data, tensor.start + first * into.itemsize)

    def read_quantised(self, tensor: Tensor, first: int, into: np.ndarray) -> None:
        """Fill `into`, float32 `[elements]`, with a tensor's dequantised elements from `first` on.

        Reads only the blocks that contain these elements. Threads may read concurrently.

        Raises:
            ValueError: The file was truncated after it was opened.
        """
        size, num_bytes = tensor.type.block_size, tensor.type.block_bytes
        step = max(1, _ELEMENTS // size)
        begin, end = first // size, -(-(first + into.size) // size)
        for block in range(begin, end, step):
            blocks = np.empty((min(step, end - block), num_bytes), np.uint8)
            fill(self._file, blocks.reshape(-1).data, tensor.start + block * num_bytes)
            values = tensor.type.dequantise(blocks)
            skipped = max(0, first - block * size)
            place = block * size + skipped - first
            held = into[place : place + values.size - skipped]
            held[...] = values[skipped : skipped + held.size]

    def check_unchanged(self) -> None:
        """Raise ValueError if the file was written to after it was opened."""
        if self._now() != self._state:
            raise ValueError(
                f"{self.path} must stay as it is while it is read, and it was changed. Load the "
                "model again when nothing writes to it, or download it again."
            )

    def check_types(self) -> None:
        """Raise ValueError if a tensor's type can't be dequantised."""
        for name, tensor in self.tensors.items():
            if not package.is_readable(tensor.type):
                raise ValueError(
                    f"{self.path} stores {shown(name)} in {tensor.type.name}, which the package "
                    f"`gguf` {package.version()} can't dequantise. Use a file in one of "
                    f"{', '.join(package.readable_types())}."
                )

    def _now(self) -> tuple[int, int]:
        """Return size in bytes and modification time in nanoseconds."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _check_unsplit(self) -> None:
        count = self.metadata.get("split.count", 1)
        if type(count) is not int or count not in (0, 1):
            raise ValueError(
                f"{self.path} must hold a whole model, and is one of {shown(count)} files that "
                "a model was split into. Join them with `llama-gguf-split --merge` of llama.cpp."
            )
