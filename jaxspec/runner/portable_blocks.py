"""Blocks of an engine as the portable arrays of request migration, and back."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxspec.cache import CacheSpec, Pools, TokenHistory
from jaxspec.cache.copies import uncopied
from jaxspec.cache.portable import (
    checkpoint_of,
    cuts,
    names,
    pages_of,
    state_arrays,
    token_arrays,
)
from jaxspec.parallel import Group
from jaxspec.plan.block_plan import Block, Copied
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.runner.blocks import BlockCopies, Contents

Arrays = Mapping[str, np.ndarray]


class PortableBlocks:
    """Convert blocks to portable arrays (`cache.portable`), and back.

    The arrays are those of the whole model. A group's block has the parts of its devices, which are
    joined for an export and cut for an import. A group of one has one part, which is the whole.
    """

    def __init__(self, blocks: BlockCopies, specs: Iterable[CacheSpec], group: Group):
        """Convert the blocks of `blocks`.

        Args:
            blocks: Copies the blocks of the engine.
            specs: Specs of its pools as on a single device.
            group: The devices that share the model.
        """
        self._blocks, self._specs, self._devices = blocks, tuple(specs), group.size
        whole, local = (BlockCopies(each, blocks.shapes) for each in (self._specs, blocks.specs))
        self._cuts: dict[bool, Contents] = {}  # of blocks with a state (True) and without
        for is_state in (False, True) if blocks.shapes.num_checkpoints else (False,):
            of_all, of_one = whole.like(is_state=is_state), local.like(is_state=is_state)
            both = whole.specs, local.specs
            self._cuts[is_state] = Contents(
                cuts(*both, of_all.pages, of_one.pages, group.size),
                cuts(*both, of_all.checkpoint, of_one.checkpoint, group.size),
            )

    def to_arrays(self, copied: Copied) -> dict[str, np.ndarray]:
        """Wait for the blocks of a prefix and convert them to portable arrays.

        Engines of other sizes, on other numbers of devices, can import these arrays.
        """
        if not copied.num_tokens:
            return {}
        num_full, arrays = copied.num_tokens // self._shapes.page_size, {}
        parts = [self._contents(block).pages for block in copied.pages]
        parts = [_part(_joined(parts), 0, num_full)] if parts else []
        if copied.state is not None:
            state = self._contents(copied.state)
            arrays = state_arrays(self._specs, state.checkpoint, copied.num_tokens)
            parts.append(state.pages)  # partly filled page, or arbitrary data after the last token
        return arrays | token_arrays(self._specs, _joined(parts), copied.num_tokens)

    def from_arrays(self, arrays: Arrays, tokens: Sequence[int]) -> Copied | None:
        """Convert portable arrays of the prefix `tokens` to blocks of this engine.

        Returns:
            The blocks, or None if an array that this engine needs is missing, for example because
            the exporting engine has another drafter.

        Raises:
            ValueError: an array has another shape or dtype than in this engine.
        """
        specs, sizes, shapes = self._specs, self._blocks.sizes, self._shapes
        count, size = len(tokens), shapes.block_pages
        if any(spec.name == TokenHistory.name for spec in specs):
            arrays = {TokenHistory.name: np.array(tokens, np.int32), **arrays}
        if uncopied(specs) or not names(specs) <= arrays.keys():
            return None
        pages, num_full = pages_of(specs, arrays, count, sizes), count // shapes.page_size
        parts = [
            _part(pages, first, min(num_full, first + size)) for first in range(0, num_full, size)
        ]
        full = tuple(self._block_of(Contents(_padded(part, size), {})) for part in parts)
        if not shapes.num_checkpoints:
            return Copied(count, full)
        tail = _padded(_part(pages, num_full, shapes.pages_for(count)), 1)
        checkpoint = checkpoint_of(specs, arrays, count, sizes)
        return Copied(count, full, self._block_of(Contents(tail, checkpoint)))

    @property
    def _shapes(self) -> StepShapes:
        return self._blocks.shapes

    def _contents(self, block: Block) -> Contents:
        """Return the contents of a block, joined from the parts of all devices."""
        return jax.tree.map(
            lambda cut, array: cut.joined(np.split(array, self._devices)),
            self._cuts[block.is_state],
            self._blocks.contents(block),
        )

    def _block_of(self, contents: Contents) -> Block:
        """Return a block with each device's part of the contents."""
        kind = bool(contents.checkpoint)
        parts = jax.tree.map(
            lambda cut, array: np.concatenate(cut.parts(array)), self._cuts[kind], contents
        )
        return self._blocks.block_of(parts)


def _joined(parts: Sequence[Pools]) -> Pools:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _part(pages: Pools, first: int, end: int) -> Pools:
    return jax.tree.map(lambda array: array[first:end], pages)


def _padded(pages: Pools, count: int) -> Pools:
    def padded(array: np.ndarray) -> np.ndarray:
        whole = np.zeros((count, *array.shape[1:]), array.dtype)
        whole[: len(array)] = array
        return whole

    return jax.tree.map(padded, pages)
