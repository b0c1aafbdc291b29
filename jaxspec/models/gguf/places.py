"""places_in: locate each hub tensor in a GGUF file, with its conversion."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxspec.gguf.file import GGUFFile
from jaxspec.gguf.header import Tensor
from jaxspec.models.gguf import REMEDY
from jaxspec.models.gguf.architectures import architecture_of, described
from jaxspec.models.gguf.conversion import AS_IT_IS, Conversion, Shape
from jaxspec.models.gguf.rotation import ROPE_FACTORS

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([\w.]+)")
_DRAFT_LAYER = "mtp.layers.0."
MAX_NAMES = 2**18
"""Maximum tensors of a file, counting each expert: about four times those of published models."""
_UNKNOWN = "gguf:"  # prefix for tensors that the architecture does not have


class Place(NamedTuple):
    """Location of a hub tensor in the file, and its conversion."""

    own: str  # name of the (first) tensor in the file
    tensors: tuple[Tensor, ...]  # concatenated along the first axis
    shape: Shape  # on the hub
    first: int = 0  # index of the first element, for an expert in a stack
    conversion: Conversion = AS_IT_IS

    @property
    def dtype(self) -> str:
        """Name of the dtype that represents all values."""
        kinds = {tensor.type.name if tensor.type.is_raw else "F32" for tensor in self.tensors}
        return kinds.pop() if len(kinds) == 1 and self.conversion.change is None else "F32"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def rows(self) -> np.ndarray | None:
        """Return the indices in the file of the hub's rows; None if the order is the same."""
        order = self.conversion.rows
        return None if order is None else order(self.shape[0])

    def columns(self) -> np.ndarray | None:
        """Return the indices in the file of a matrix's columns; None if the order is the same."""
        order = self.conversion.columns
        return None if order is None or len(self.shape) != 2 else order(self.shape[1])


def places_in(file: GGUFFile) -> Mapping[str, Place]:
    """Map hub names to places; tensors unknown to the architecture get the prefix "gguf:".

    Raises:
        ValueError: As `described`, or there are more than `MAX_NAMES` tensors.
    """
    layout, found = _Layout(file), {}
    for own in file.tensors:
        for name, place in layout.places(own):
            if len(found) == MAX_NAMES:
                raise ValueError(
                    f"{file.path} must hold at most {MAX_NAMES:,} published tensors, with each "
                    f"expert's own, and holds more. {REMEDY}"
                )
            # A second tensor with the same hub name counts as unknown.
            found[name if name not in found else _UNKNOWN + own] = place
    return found


class _Layout:
    """Names and storage of the tensors of a file."""

    def __init__(self, file: GGUFFile):
        model = described(file)
        _, self._architecture = architecture_of(file)
        self._tensors = file.tensors
        self._num_experts = model.num_experts
        self._num_layers = model.num_layers
        self._num_blocks = model.num_layers + model.num_draft_blocks
        self._conversions = self._architecture.conversions(model)
        # Tensors whose rows are appended to another's -> that one.
        self._leaders = {
            tail: leader
            for leader, conversion in self._conversions.items()
            for tail in conversion.behind
        }

    def places(self, own: str) -> Iterator[tuple[str, Place]]:
        """Yield the hub tensors that one tensor of the file contains."""
        if own == ROPE_FACTORS:
            return
        if own in self._architecture.outside:
            yield self._architecture.outside[own], self._place(own, own)
        elif (match := _BLOCK.fullmatch(own)) and int(match[1]) < self._num_blocks:
            yield from self._in_block(own, int(match[1]), match[2])
        else:
            yield self._unknown(own)

    def _in_block(self, own: str, number: int, tail: str) -> Iterator[tuple[str, Place]]:
        """Yield the hub tensors in the tensor `blk.<number>.<tail>`."""
        architecture = self._architecture
        layer = f"{architecture.layer}{number}."
        if number == self._num_layers:
            if not architecture.draft_head:
                return  # draft head that is not supported in GGUF files
            if tail in architecture.draft_head:
                yield architecture.draft_head[tail], self._place(own, tail)
                return
            layer = _DRAFT_LAYER
        stack, _, kind = tail.rpartition(".")
        if (leader := self._leaders.get(tail)) and f"blk.{number}.{leader}" in self._tensors:
            return  # already part of the leader's place
        if stack in architecture.stacks and self._is_stack(own):
            for expert, place in enumerate(self._experts(own)):
                yield f"{layer}{architecture.stacks[stack].format(expert)}.{kind}", place
        elif (name := self._published(tail)) is not None:
            try:
                yield layer + name, self._place(own, tail)
            except LookupError:
                yield self._unknown(own)
        else:
            yield self._unknown(own)

    def _published(self, tail: str) -> str | None:
        """Return the hub name within a layer; None if the architecture has no such tensor."""
        blocks, (name, _, kind) = self._architecture.blocks, tail.rpartition(".")
        if tail in blocks:
            return blocks[tail]
        return f"{blocks[name]}.{kind}" if kind in ("weight", "bias") and name in blocks else None

    def _place(self, own: str, tail: str) -> Place:
        """Return the place of a tensor that is not a stack of experts.

        Raises:
            LookupError: A tensor to append is missing or has another width.
        """
        conversion = self._conversions.get(tail, AS_IT_IS)
        stem = own.removesuffix(tail)
        tensors = self._tensors[own], *(self._tensors[stem + each] for each in conversion.behind)
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            raise LookupError(own)
        rows = sum(tensor.shape[0] for tensor in tensors)
        shape = conversion.shape((rows, *tensors[0].shape[1:]))
        return Place(own, tensors, shape, conversion=conversion)

    def _is_stack(self, own: str) -> bool:
        shape = self._tensors[own].shape
        return len(shape) == 3 and shape[0] == self._num_experts

    def _experts(self, own: str) -> Iterator[Place]:
        tensor = self._tensors[own]
        shape = tensor.shape[1:]
        for expert in range(self._num_experts):
            yield Place(own, (tensor,), shape, expert * math.prod(shape))

    def _unknown(self, own: str) -> tuple[str, Place]:
        tensor = self._tensors[own]
        return _UNKNOWN + own, Place(own, (tensor,), tensor.shape)
