"""Conversion between blocks and the portable arrays that engines of other sizes can import."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxspec.cache import Pools, TokenHistory
from jaxspec.cache.copies import uncopied
from jaxspec.cache.portable import checkpoint_of, names, pages_of, state_arrays, token_arrays
from jaxspec.plan.block_plan import Copied
from jaxspec.runner.blocks import Contents
from jaxspec.runner.model_runner import ModelRunner

Arrays = Mapping[str, np.ndarray]


def arrays_of(runner: ModelRunner, copied: Copied) -> dict[str, np.ndarray]:
    """Wait for the blocks of a prefix and convert them to portable arrays (`cache.portable`)."""
    if not copied.num_tokens:
        return {}
    blocks, arrays = runner.blocks, {}
    num_full = copied.num_tokens // runner.shapes.page_size
    parts = [blocks.contents(block).pages for block in copied.pages]
    parts = [_part(_joined(parts), 0, num_full)] if parts else []
    if copied.state is not None:
        state = blocks.contents(copied.state)
        arrays = state_arrays(blocks.specs, state.checkpoint, copied.num_tokens)
        parts.append(state.pages)  # the partly filled page, or arbitrary data after the last token
    return arrays | token_arrays(blocks.specs, _joined(parts), copied.num_tokens)


def copied_of(runner: ModelRunner, arrays: Arrays, tokens: Sequence[int]) -> Copied | None:
    """Convert portable arrays of the prefix `tokens` to blocks of this engine.

    Returns:
        The blocks, or None if an array that this engine needs is missing, for example because the
        exporting engine has another drafter.

    Raises:
        ValueError: an array has another shape or dtype than in this engine.
    """
    blocks, shapes, count = runner.blocks, runner.shapes, len(tokens)
    if any(spec.name == TokenHistory.name for spec in blocks.specs):
        arrays = {TokenHistory.name: np.array(tokens, np.int32), **arrays}
    if uncopied(blocks.specs) or not names(blocks.specs) <= arrays.keys():
        return None
    pages = pages_of(blocks.specs, arrays, count, blocks.sizes)
    num_full, size = count // shapes.page_size, shapes.block_pages
    full = [
        blocks.block_of(
            Contents(_padded(_part(pages, first, min(num_full, first + size)), size), {})
        )
        for first in range(0, num_full, size)
    ]
    if not shapes.num_checkpoints:
        return Copied(count, tuple(full))
    tail = _padded(_part(pages, num_full, shapes.pages_for(count)), 1)
    checkpoint = checkpoint_of(blocks.specs, arrays, count, blocks.sizes)
    return Copied(count, tuple(full), blocks.block_of(Contents(tail, checkpoint)))


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
