"""GGUFCheckpoint: the tensors in a GGUF file, by their published names and as numbers again."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.gguf.file import GGUFFile
from jaxspec.gguf.header import Tensor
from jaxspec.models.gguf.architectures import (
    EXPERTS,
    OUTSIDE_BLOCKS,
    architecture_of,
    metadata_of,
)
from jaxspec.models.gguf.fields import ROPE_FACTORS
from jaxspec.models.kinds import SIZE
from jaxspec.models.safetensors_file import StoredTensor

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")
_LAYERS = "model.layers."
_UNKNOWN = "gguf:"  # before the names of tensors that the architecture does not have
_QUERIES, _KEYS = "attn_q", "attn_k"


class _Place(NamedTuple):
    """Where a published tensor lies in the file."""

    tensor: Tensor
    shape: tuple[int, ...]
    first: int = 0  # of its elements in the tensor: an expert is a part of a stack
    heads: int = 0  # in which channels lie by pairs; 0: rows lie as they were published


class GGUFCheckpoint:
    """The tensors of an open GGUF file: a `Checkpoint`, whose quantised tensors read as float32.

    They are dequantised when they are read, a part at a time. A context manager.
    """

    asked_by = "metadata"
    remedy = "Download the file again, convert it anew, or use the folder of its safetensors."

    def __init__(self, path: Path):
        """Open the file and check its header.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: as `GGUFFile` and `architecture_of`, or tensors are of a type that can't be
                dequantised.
        """
        self.path = path
        self._file = GGUFFile(path)
        try:
            self._file.check_types()
            self._places = dict(_places(self._file))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "GGUFCheckpoint":
        """The checkpoint itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's published name; gguf: and its own if the architecture has none such."""
        return frozenset(self._places)

    def files_of(self, name: str) -> list[str]:
        """The name of the file."""
        return [self.path.name]

    def stored(self, name: str) -> StoredTensor:
        """A tensor's shape, and the dtype that `read` gives."""
        tensor, shape, *_ = self._places[name]
        dtype = tensor.type.name if tensor.type.is_raw else "F32"
        return StoredTensor(dtype, shape, tensor.start, tensor.num_bytes)

    def bytes_by_type(self) -> Mapping[str, int]:
        """The bytes of all tensors, by the type that they are stored in."""
        num_bytes: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            num_bytes[tensor.type.name] += tensor.num_bytes
        return num_bytes

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[elements]`, with a tensor's elements from `first` on, in C order.

        It must have the dtype that `stored` says. Several threads may read at once.

        Raises:
            ValueError: the file was cut short since it was opened.
        """
        place = self._places[name]
        if not place.heads:
            self._read(place.tensor, place.first + first, into)
            return
        size = math.prod(place.shape) // place.heads
        head = np.empty(size, into.dtype)
        for start in range(first // size * size, first + into.size, size):
            self._read(place.tensor, start, head)
            low, high = max(first, start), min(first + into.size, start + size)
            into[low - first : high - first] = _by_halves(head, place)[low - start : high - start]

    def check_unchanged(self) -> None:
        """ValueError if the file was written to since it was opened."""
        self._file.check_unchanged()

    def _read(self, tensor: Tensor, first: int, into: np.ndarray) -> None:
        read = self._file.read_raw if tensor.type.is_raw else self._file.read_quantised
        read(tensor, first, into)


def _by_halves(head: np.ndarray, place: _Place) -> np.ndarray:
    """A head's elements with the two channels of a pair half a head apart.

    llama.cpp rotates channels 2i and 2i + 1 together, transformers i and i + half a head.
    """
    return head.reshape(-1, 2, place.shape[-1]).swapaxes(0, 1).reshape(-1)


def _places(file: GGUFFile) -> Iterator[tuple[str, _Place]]:
    """The published tensors and where they lie; others by a name that no published one has."""
    layout = _Layout(file)
    for own, tensor in file.tensors.items():
        if own == ROPE_FACTORS:
            continue
        if own in OUTSIDE_BLOCKS:
            yield OUTSIDE_BLOCKS[own], _Place(tensor, tensor.shape)
        elif match := _BLOCK.fullmatch(own):
            yield from layout.in_block(match, tensor)
        else:
            yield _UNKNOWN + own, _Place(tensor, tensor.shape)


class _Layout:
    """How the tensors of a block lie in a file."""

    def __init__(self, file: GGUFFile):
        name, self._architecture = architecture_of(file)
        metadata = metadata_of(file)
        self._num_experts = metadata.find(f"{name}.expert_count", EXPERTS) or 0
        self._heads: dict[str, int] = {}
        if self._architecture.by_pairs:
            heads = metadata.need(f"{name}.attention.head_count", SIZE)
            kv_heads = metadata.find(f"{name}.attention.head_count_kv", SIZE) or heads
            self._heads = {_QUERIES: heads, _KEYS: kv_heads}

    def in_block(self, match: re.Match[str], tensor: Tensor) -> Iterator[tuple[str, _Place]]:
        """The published tensors that one tensor of a block holds."""
        number, own, kind = match.groups()
        blocks, stacks = self._architecture.blocks, self._architecture.stacks
        if own in blocks:
            place = _Place(tensor, tensor.shape, heads=self._evenly(own, tensor))
            yield f"{_LAYERS}{number}.{blocks[own]}.{kind}", place
        elif own in stacks and tensor.shape[0] == self._num_experts:
            shape = tensor.shape[1:]
            for expert in range(self._num_experts):
                place = _Place(tensor, shape, expert * math.prod(shape))
                yield f"{_LAYERS}{number}.{stacks[own].format(expert)}.{kind}", place
        else:
            yield _UNKNOWN + match[0], _Place(tensor, tensor.shape)

    def _evenly(self, own: str, tensor: Tensor) -> int:
        """The heads that cut the rows evenly; 0 where none do, so that the shape is refused."""
        heads = self._heads.get(own, 0)
        return heads if heads and tensor.shape[0] % (2 * heads) == 0 else 0
