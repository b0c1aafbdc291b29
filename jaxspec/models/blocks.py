"""Map a parameter to runs of elements in checkpoint files, and cut it into blocks for buffers.

A parameter is assembled in the layout of the checkpoint: where stored matrices are transposed on
load, their rows are consecutive in the parameter's transpose. So nearly every run covers a whole
tensor, or as much of it as fits into a block.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx

from jaxspec.models.layers.parameters import Picked, Placement, box

_STRIP = 64  # rows
_FLOAT32 = np.dtype(np.float32)


class Run(NamedTuple):
    """Elements that are contiguous both in a tensor and in the parameter."""

    tensor: str  # name in the checkpoint
    source: int  # index of the first element in the tensor, in C order
    target: int  # index of the first element in the parameter, in the checkpoint's layout
    length: int
    scale: float  # factor applied to the elements


class Block(NamedTuple):
    """A contiguous part of a parameter in the checkpoint's layout."""

    start: tuple[int, ...]  # index on each axis
    shape: tuple[int, ...]
    first: int  # index of its first element in the parameter, in C order
    repeated: int  # number of elements that the previous block also has
    runs: list[Run]  # targets are relative to the block's first element

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def transpose(self, elements: np.ndarray, into: np.ndarray) -> None:
        """Write the block's elements, `[size]`, transposed into the parameter `into`.

        Strips that fit into the CPU cache make this three times as fast as one transpose.
        """
        rows, extents = elements.reshape(self.shape), zip(self.start, self.shape, strict=True)
        place = into.T[tuple(slice(start, start + length) for start, length in extents)]
        for start in range(0, len(rows), _STRIP):
            place[start : start + _STRIP] = rows[start : start + _STRIP]


@dataclasses.dataclass(frozen=True)
class Source:
    """The runs that fill one parameter."""

    param: nnx.Param
    shape: tuple[int, ...]  # in the checkpoint's layout
    transpose: bool  # True if the parameter is the transpose of the stored tensors
    param_dtype: np.dtype
    dtype: np.dtype  # represents every stored value exactly; float32 if a run is scaled
    runs: list[Run]  # sorted by target, without overlaps
    dtype_of: Callable[[str], np.dtype]  # the stored dtype of a tensor

    @classmethod
    def of(
        cls,
        placements: Sequence[Placement],
        name_of: Callable[[str], str],
        dtype_of: Callable[[str], np.dtype],
    ) -> "Source":
        """Make the source of one parameter from its placements.

        Args:
            placements: All placements of the parameter.
            name_of: Maps canonical tensor names to the checkpoint's.
            dtype_of: Maps a tensor's name in the checkpoint to its stored dtype.
        """
        param, transpose = placements[0].param, placements[0].transpose
        assert all(placement.transpose == transpose for placement in placements)
        shape: tuple[int, ...] = param.shape  # read once: the property of nnx.Param is slow
        runs = [run for each in placements for run in _runs(each, name_of(each.name), shape)]
        dtypes = {dtype_of(run.tensor) if run.scale == 1.0 else _FLOAT32 for run in runs}
        return cls(
            param=param,
            shape=shape[::-1] if transpose else shape,
            transpose=transpose,
            param_dtype=np.dtype(param.dtype),
            # float32 represents every value of bfloat16 and float16.
            dtype=dtypes.pop() if len(dtypes) == 1 else _FLOAT32,
            runs=sorted(runs, key=_target),
            dtype_of=dtype_of,
        )

    @property
    def num_bytes(self) -> int:
        """Size of the parameter in the stored dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, most: int) -> Iterator[Block]:
        """Yield blocks of one shape, at most `most` bytes each, that cover the parameter.

        A block is a range of rows of the first axis whose rows are small enough. All blocks have
        the same shape so that one compiled program writes them all; the last one therefore starts
        early and repeats some rows, fewer than there are blocks.
        """
        axis, row = 0, math.prod(self.shape[1:])
        while row * self.dtype.itemsize > most and axis + 1 < len(self.shape):
            axis += 1
            row //= self.shape[axis]
        count = self.shape[axis]
        most_rows = max(1, most // (row * self.dtype.itemsize))
        rows = -(-count // -(-count // most_rows))  # the fewest blocks, of equal size
        shape = *(1,) * axis, rows, *self.shape[axis + 1 :]
        rest = (0,) * (len(shape) - axis - 1)
        begins = [run.target for run in self.runs]
        ends = [run.target + run.length for run in self.runs]
        for number, outer in enumerate(np.ndindex(self.shape[:axis])):
            for begin in range(0, count, rows):
                start = min(begin, count - rows)
                first = (number * count + start) * row
                last = first + rows * row
                inside = slice(bisect.bisect_right(ends, first), bisect.bisect_left(begins, last))
                runs = [_part(run, first, last) for run in self.runs[inside]]
                yield Block((*outer, start, *rest), shape, first, (begin - start) * row, runs)

    def read(
        self, block: Block, read: Callable[[str, int, np.ndarray], None], into: np.ndarray
    ) -> None:
        """Fill `into`, `[elements]`, with a block. `read` is `Checkpoint.read`."""
        if sum(run.length for run in block.runs) < into.size:
            into[...] = 0  # padding of the parameter
        for tensor, source, target, length, scale in block.runs:
            place, stored = into[target : target + length], self.dtype_of(tensor)
            if stored == into.dtype and scale == 1.0:
                read(tensor, source, place)
            else:
                held = np.empty(length, stored)
                read(tensor, source, held)
                place[...] = held if scale == 1.0 else held.astype(_FLOAT32) * np.float32(scale)


def _part(run: Run, begin: int, end: int) -> Run:
    """Return the part of a run between two elements of the parameter."""
    low, high = max(run.target, begin), min(run.target + run.length, end)
    return Run(run.tensor, run.source + low - run.target, low - begin, high - low, run.scale)


def _runs(placement: Placement, name: str, shape: tuple[int, ...]) -> Iterator[Run]:
    sources, length = [0], math.prod(placement.shape)
    if placement.part is not ...:  # rare; checkpoints can have 74,000 tensors
        sources, length = _stretches(placement.shape, box(placement.shape, placement.part))
    place = box(shape, placement.index)
    if placement.transpose:
        shape, place = shape[::-1], place[::-1]
    targets, other = _stretches(shape, place)
    both = math.gcd(length, other)
    for source, target in zip(_cut(sources, length, both), _cut(targets, other, both), strict=True):
        yield Run(name, source, target, both, placement.scale)


def _stretches(shape: tuple[int, ...], box: list[Picked]) -> tuple[list[int], int]:
    """Return the starts of contiguous stretches of a box, in C order, and their common length."""
    starts, length, stride = [0], 1, 1
    for size, picked in zip(reversed(shape), reversed(box), strict=True):
        together = _together(picked) if length == stride else 1
        places = picked[::together]
        starts = [int(place) * stride + start for place in places for start in starts]
        length *= together
        stride *= size
    return starts, length


def _together(picked: Picked) -> int:
    """Return the largest length of consecutive indices that `picked` splits into evenly."""
    if isinstance(picked, range):
        return len(picked) if picked.step == 1 else 1
    breaks = np.flatnonzero(np.diff(picked) != 1) + 1
    return math.gcd(*breaks.tolist(), len(picked))


def _cut(starts: list[int], length: int, into: int) -> Iterator[int]:
    pieces = range(0, length, into or 1)
    return (start + piece for start, piece in itertools.product(starts, pieces))


def _target(run: Run) -> int:
    return run.target
