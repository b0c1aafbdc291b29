"""Pieces in the portable form, which engines of other sizes read, and from it."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxspec.cache import Pools, TokenHistory
from jaxspec.cache.copies import uncopied
from jaxspec.cache.portable import checkpoint_of, names, pages_of, state_arrays, token_arrays
from jaxspec.piece_plan import Copied
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.pieces import Contents

Arrays = Mapping[str, np.ndarray]


def arrays_of(runner: ModelRunner, copied: Copied) -> dict[str, np.ndarray]:
    """What was copied of a text's first tokens, in the portable form (`cache.portable`).

    Waits for the copies.
    """
    if not copied.num_tokens:
        return {}
    pieces, arrays = runner.pieces, {}
    num_full = copied.num_tokens // runner.shapes.page_size
    parts = [pieces.contents(piece).pages for piece in copied.pages]
    parts = [_part(_joined(parts), 0, num_full)] if parts else []
    if copied.state is not None:
        state = pieces.contents(copied.state)
        arrays = state_arrays(pieces.specs, state.checkpoint, copied.num_tokens)
        parts.append(state.pages)  # the partly filled page, or junk behind the last token
    return arrays | token_arrays(pieces.specs, _joined(parts), copied.num_tokens)


def copied_of(runner: ModelRunner, arrays: Arrays, tokens: Sequence[int]) -> Copied | None:
    """Pieces for this engine with what another one computed of these first tokens of a text.

    None: something is missing that this engine keeps, as where the other one has no such drafter.

    Raises:
        ValueError: an array is not what this engine keeps.
    """
    pieces, shapes, count = runner.pieces, runner.shapes, len(tokens)
    if any(spec.name == TokenHistory.name for spec in pieces.specs):
        arrays = {TokenHistory.name: np.array(tokens, np.int32), **arrays}
    if uncopied(pieces.specs) or not names(pieces.specs) <= arrays.keys():
        return None
    pages = pages_of(pieces.specs, arrays, count, pieces.sizes)
    num_full, size = count // shapes.page_size, shapes.piece_pages
    full = [
        pieces.piece_of(
            Contents(_padded(_part(pages, first, min(num_full, first + size)), size), {})
        )
        for first in range(0, num_full, size)
    ]
    if not shapes.num_checkpoints:
        return Copied(count, tuple(full))
    tail = _padded(_part(pages, num_full, shapes.pages_for(count)), 1)
    checkpoint = checkpoint_of(pieces.specs, arrays, count, pieces.sizes)
    return Copied(count, tuple(full), pieces.piece_of(Contents(tail, checkpoint)))


def _joined(parts: Sequence[Pools]) -> Pools:
    """Pages end to end."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _part(pages: Pools, first: int, end: int) -> Pools:
    return jax.tree.map(lambda array: array[first:end], pages)


def _padded(pages: Pools, count: int) -> Pools:
    """The pages and zeros behind them, `count` together."""

    def padded(array: np.ndarray) -> np.ndarray:
        whole = np.zeros((count, *array.shape[1:]), array.dtype)
        whole[: len(array)] = array
        return whole

    return jax.tree.map(padded, pages)
