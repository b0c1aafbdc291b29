"""places_in: where each published tensor lies in a GGUF file, and how it was converted."""

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
"""Published tensors of a file, experts one by one: some four times those of published models."""
_UNKNOWN = "gguf:"  # before the names of tensors that the architecture does not have


class Place(NamedTuple):
    """Where a published tensor lies in the file, and how it is made of what lies there."""

    own: str  # the file's name of the tensor, or of the first
    tensors: tuple[Tensor, ...]  # whose elements follow each other
    shape: Shape  # as published
    first: int = 0  # of its elements: an expert is a part of a stack
    conversion: Conversion = AS_IT_IS

    @property
    def dtype(self) -> str:
        """The name of the dtype that has all published values."""
        kinds = {tensor.type.name if tensor.type.is_raw else "F32" for tensor in self.tensors}
        return kinds.pop() if len(kinds) == 1 and self.conversion.change is None else "F32"

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors in the file."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def rows(self) -> np.ndarray | None:
        """The places of the published rows in the file; None: they lie as they were published."""
        order = self.conversion.rows
        return None if order is None else order(self.shape[0])

    def columns(self) -> np.ndarray | None:
        """Those of the columns of a matrix, likewise."""
        order = self.conversion.columns
        return None if order is None or len(self.shape) != 2 else order(self.shape[1])


def places_in(file: GGUFFile) -> Mapping[str, Place]:
    """The published tensors and where they lie; others by a name that no published one has.

    Raises:
        ValueError: as `described`, or there are more than `MAX_NAMES`.
    """
    layout, found = _Layout(file), {}
    for own in file.tensors:
        for name, place in layout.places(own):
            if len(found) == MAX_NAMES:
                raise ValueError(
                    f"{file.path} must hold at most {MAX_NAMES:,} published tensors, with each "
                    f"expert's own, and holds more. {REMEDY}"
                )
            # A second tensor of one published name counts as unknown.
            found[name if name not in found else _UNKNOWN + own] = place
    return found


class _Layout:
    """How the tensors of a file are called and stored."""

    def __init__(self, file: GGUFFile):
        model = described(file)
        _, self._architecture = architecture_of(file)
        self._tensors = file.tensors
        self._num_experts = model.num_experts
        self._num_layers = model.num_layers
        self._num_blocks = model.num_layers + model.num_draft_blocks
        self._conversions = self._architecture.conversions(model)
        # The tensors whose rows come behind those of others.
        self._leaders = {
            tail: leader
            for leader, conversion in self._conversions.items()
            for tail in conversion.behind
        }

    def places(self, own: str) -> Iterator[tuple[str, Place]]:
        """The published tensors that one tensor of the file holds."""
        if own == ROPE_FACTORS:
            return
        if own in self._architecture.outside:
            yield self._architecture.outside[own], self._place(own, own)
        elif (match := _BLOCK.fullmatch(own)) and int(match[1]) < self._num_blocks:
            yield from self._in_block(own, int(match[1]), match[2])
        else:
            yield self._unknown(own)

    def _in_block(self, own: str, number: int, tail: str) -> Iterator[tuple[str, Place]]:
        """Those of a tensor that `tail` names behind `blk.N.`."""
        architecture = self._architecture
        layer = f"{architecture.layer}{number}."
        if number == self._num_layers:
            if not architecture.draft_head:
                return  # of a head that jaxspec does not read from GGUF files
            if tail in architecture.draft_head:
                yield architecture.draft_head[tail], self._place(own, tail)
                return
            layer = _DRAFT_LAYER
        stack, _, kind = tail.rpartition(".")
        if (leader := self._leaders.get(tail)) and f"blk.{number}.{leader}" in self._tensors:
            return  # it is a part of the leader's place
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
        """The published name behind that of a layer; None where the architecture has no such."""
        blocks, (name, _, kind) = self._architecture.blocks, tail.rpartition(".")
        if tail in blocks:
            return blocks[tail]
        return f"{blocks[name]}.{kind}" if kind in ("weight", "bias") and name in blocks else None

    def _place(self, own: str, tail: str) -> Place:
        """The place of a tensor that is not one of a stack.

        Raises:
            LookupError: a tensor that belongs to it is missing, or of another width.
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
