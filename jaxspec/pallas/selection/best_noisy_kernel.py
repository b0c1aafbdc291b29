"""Kernel of `best_noisy` (Pallas, Mosaic GPU): a block reduces some parts of a row.

Blocks of a row that is not wanted exit at once. Each thread keeps the best score seen at each of
its positions, and the block compares them once at its end.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.selection.last_kept import LastKept
from jaxspec.pallas.selection.noise import RowKeys, gumbel, random_bits
from jaxspec.pallas.selection.parts import PART, TILE

_TOGETHER = 2  # tiles whose loads are in flight at the same time
_BLOCKS = 16 * device.MULTIPROCESSORS  # enough blocks even when few rows are wanted


@functools.partial(jax.jit, static_argnames="interpret")
def best_noisy_kernel(scores, keys, is_noisy, last, wanted, *, interpret=None):
    rows, vocab = scores.shape
    parts = pl.cdiv(vocab, PART)
    of_block = min(parts, max(1, rows * parts // _BLOCKS))
    blocks = pl.cdiv(parts, of_block)

    def body(scores, first, second, is_noisy, last_logit, last_id, wanted, best, column):
        row, block = lax.axis_index("row"), lax.axis_index("block")

        @pl.when(wanted[row] > 0)
        def _():
            begin = block * (of_block * PART)
            part = _Part(scores, row, begin, jnp.minimum(begin + of_block * PART, vocab))
            keys, last = RowKeys(first[row], second[row]), LastKept(last_logit[row], last_id[row])
            score, chosen = part.best(keys, is_noisy[row], last)
            most = jnp.max(score)
            best[row, block] = most
            column[row, block] = jnp.min(jnp.where(score == most, chosen, vocab))

    kernel = plgpu.kernel(
        body,
        kernel_name="best_noisy",
        out_type=(
            jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
            jax.ShapeDtypeStruct((rows, blocks), jnp.int32),
        ),
        grid=(rows, blocks),
        grid_names=("row", "block"),
        compiler_params=plgpu.CompilerParams(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flags = is_noisy.astype(jnp.float32), *last, wanted.astype(jnp.int32)
    best, column = kernel(scores, *keys, *flags)
    # The first block with the largest score has the lowest id. Without a kept score: column 0.
    block = jnp.argmax(best, axis=1)[:, None]
    found = jnp.take_along_axis(column, block, axis=1)[:, 0]
    return jnp.where(wanted & (found < vocab), found, 0)


class _Part(NamedTuple):
    """Scores of a row from column `begin` to `end`."""

    scores: Any
    row: Any
    begin: Any
    end: Any

    def best(self, keys, share, last):
        """Return, in registers, the best score at each of `TILE` positions, and its column.

        `share` is the factor of the noise: 1, or 0 for none. Without a kept score, the column is
        `vocab`.
        """
        vocab, layout = self.scores.shape[1], layouts.vectors(TILE // device.THREADS)
        places = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout)

        def better(start, so_far):
            begin = jnp.minimum(start, vocab - TILE)
            x = access.load(self.scores.at[self.row, pl.ds(begin, TILE)], layout)
            ids = places + begin
            noisy = x + gumbel(random_bits(keys, ids.astype(jnp.uint32))) * share
            is_kept = (x > last.logit) | ((x == last.logit) & (ids <= last.id))
            score, chosen = so_far
            is_better = (noisy > score) & is_kept
            return jnp.where(is_better, noisy, score), jnp.where(is_better, ids, chosen)

        def add_tiles(i, so_far):
            # In id order, so that the first of equal scores is kept.
            for tile in range(_TOGETHER):
                so_far = better(self.begin + (i * _TOGETHER + tile) * TILE, so_far)
            return so_far

        nothing = (
            plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), layout),
            plgpu.layout_cast(jnp.full((TILE,), vocab, jnp.int32), layout),
        )
        times = pl.cdiv(self.end - self.begin, _TOGETHER * TILE)
        return lax.fori_loop(0, times, add_tiles, nothing)
