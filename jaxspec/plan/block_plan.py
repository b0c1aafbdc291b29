"""Blocks: copies of pages and cached states in host memory, and the plans that move them.

A block has room for `StepShapes.block_pages` pages, or for one cached state and the partly filled
page at its end. `plan.READ` and `plan.READ_STATE` copy from the pools into a block, `plan.WRITE`
and `plan.WRITE_STATE` from a block into the pools. All their plans have the layout `block_layout`.
Imports no JAX.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxspec.layout import Field, PackedLayout

_numbers = itertools.count(1)


class Key(NamedTuple):
    """Key of a page, and of the cached state at its end."""

    before: bytes  # digest of the text before the page (`prefix.tree.digest_of`)
    tokens: tuple[int, ...]  # of the page; less than a full page only for a state


class Block:
    """Copy of pages or of a cached state; its memory is freed with the last reference to it.

    The runner sets `arrays` once, when it dispatches the copy, possibly before the device has
    finished writing. They are the leaves of `runner.blocks.Contents`. A block of the prefix cache
    has the `keys` of its pages, in their order, or the key of its state.
    """

    __slots__ = ("arrays", "is_state", "keys", "number")

    def __init__(
        self,
        *,
        is_state: bool,
        keys: Iterable[Key] = (),
        arrays: tuple[Any, ...] | None = None,
    ):
        """Create an empty block, or one with `arrays` from another engine or a file."""
        self.number = next(_numbers)  # identifies the block in plans and in flight replays
        self.is_state, self.keys, self.arrays = is_state, tuple(keys), arrays

    def without_arrays(self) -> "Block":
        """Return an empty block with the same keys."""
        return Block(is_state=self.is_state, keys=self.keys)


class Read(NamedTuple):
    """Copy of pages and of a state slot from the pools into a block."""

    block: Block
    pages: tuple[int, ...]  # in the order of their places in the block
    checkpoint: int = 0  # slot of the cached state; 0 means none


class Write(NamedTuple):
    """Copy of pages and of a state from a block into the pools."""

    block: Block
    places: tuple[int, ...]  # indices of pages in the block
    pages: tuple[int, ...]  # target page of each
    checkpoint: int = 0  # target slot of the cached state; 0 means none


class Copied(NamedTuple):
    """Blocks of the first tokens of a text; the copies into them may be in flight."""

    num_tokens: int
    pages: tuple[Block, ...] = ()  # full pages, in order; all blocks but the last are full
    state: Block | None = None  # cached state and partly filled page; None without states


@functools.cache
def block_layout(num_pages: int) -> PackedLayout:
    """Return the layout of a plan that reads or writes a block of `num_pages` pages."""
    pages = (num_pages,)
    return PackedLayout(
        [
            Field("block", "Number of the block; 0 means none."),
            Field("checkpoint", "Slot of the cached state; 0 means none."),
            Field("sources", "Pages to read; places in the block to write.", shape=pages),
            Field("targets", "Pages to write; 0 means nowhere.", shape=pages),
        ]
    )


def pack_block(copy: Read | Write, num_pages: int) -> np.ndarray:
    """Return the packed plan of a copy: int32, `block_layout(num_pages)`.

    Raises:
        ValueError: the copy has more pages than a block.
    """
    if len(copy.pages) > num_pages:
        raise ValueError(
            f"A piece has room for {num_pages} pages, {len(copy.pages)} came: the scheduler must "
            "copy them in parts."
        )
    layout = block_layout(num_pages)
    packed = np.zeros(layout.size, np.int32)
    fields = layout.unpack(packed)
    fields["block"][...], fields["checkpoint"][...] = copy.block.number, copy.checkpoint
    sources = copy.pages if isinstance(copy, Read) else copy.places
    fields["sources"][: len(sources)] = sources
    if isinstance(copy, Write):
        fields["targets"][: len(copy.pages)] = copy.pages
    return packed
