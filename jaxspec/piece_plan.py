"""Pieces: pages and kept states on their way between the pools and the host's memory.

A piece has room for `StepShapes.piece_pages` pages, or for one checkpoint and the partly filled
page behind which it stands. `plan.READ` and `plan.READ_STATE` fill one, `plan.WRITE` and
`plan.WRITE_STATE` put one back, and each has a plan of this layout. No JAX here.
"""

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from jaxspec.layout import Field, PackedLayout

_numbers = itertools.count(1)


class Piece:
    """What was copied out of the pools. Whoever refers to it keeps its memory.

    The runner sets `arrays` when it dispatches the copy, and nobody changes them afterwards. The
    device may still be writing there. They are the leaves of `runner.pieces.Contents`.
    """

    __slots__ = ("arrays", "is_state", "number")

    def __init__(self, *, is_state: bool, arrays: tuple[Any, ...] | None = None):
        """Be a new one; `arrays`: of a piece that was never on this engine's device."""
        self.number = next(_numbers)  # a plan names it so, and a replay finds it again
        self.is_state, self.arrays = is_state, arrays


class Read(NamedTuple):
    """Pages of the pools, and a checkpoint's slot, that fill a piece in this order."""

    piece: Piece
    pages: tuple[int, ...]
    checkpoint: int = 0  # 0: none


class Write(NamedTuple):
    """Pages of a piece, by their places in it, and where in the pools they go."""

    piece: Piece
    places: tuple[int, ...]
    pages: tuple[int, ...]
    checkpoint: int = 0  # the slot that gets its state; 0: none


class Copied(NamedTuple):
    """The first tokens of a text, on the host or on the way there."""

    num_tokens: int
    pages: tuple[Piece, ...] = ()  # their full pages in order, as many as fit in each piece
    state: Piece | None = None  # what lies by slot, and the partly filled page; None: no states


@functools.cache
def piece_layout(num_pages: int) -> PackedLayout:
    """Where each field of a plan lies that reads or writes a piece of so many pages."""
    pages = (num_pages,)
    return PackedLayout(
        [
            Field("piece", "The number of the piece; 0: none."),
            Field("checkpoint", "The slot of checkpoints that is read or written; 0: none."),
            Field("sources", "Pages that are read; places in the piece, to write.", shape=pages),
            Field("targets", "Pages that are written; 0: nowhere.", shape=pages),
        ]
    )


def pack_piece(copy: Read | Write, num_pages: int) -> np.ndarray:
    """The packed plan of a copy: int32, `piece_layout(num_pages)`.

    Raises:
        ValueError: it has more pages than a piece.
    """
    if len(copy.pages) > num_pages:
        raise ValueError(
            f"A piece has room for {num_pages} pages, {len(copy.pages)} came: the scheduler must "
            "copy them in parts."
        )
    layout = piece_layout(num_pages)
    packed = np.zeros(layout.size, np.int32)
    fields = layout.unpack(packed)
    fields["piece"][...], fields["checkpoint"][...] = copy.piece.number, copy.checkpoint
    sources = copy.pages if isinstance(copy, Read) else copy.places
    fields["sources"][: len(sources)] = sources
    if isinstance(copy, Write):
        fields["targets"][: len(copy.pages)] = copy.pages
    return packed
