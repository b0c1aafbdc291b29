"""Kernel of `sums_above` (Pallas, Mosaic GPU): a block sums some adjacent parts of a row.

A search calls it many times for few of the rows. So blocks of rows that are not wanted exit at
once, and there are no more blocks than keep the GPU busy. Each part is summed separately, so
results do not depend on the number of parts per block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.selection.parts import PART, TILE

_TOGETHER = 2  # tiles whose loads are in flight at the same time
_BLOCKS = 16 * device.MULTIPROCESSORS  # enough blocks even when few rows are wanted


@functools.partial(jax.jit, static_argnames="interpret")
def sums_above_kernel(logits, largest, limits, counts, wanted, *, interpret=None):
    (rows, vocab), num_limits = logits.shape, limits.shape[1]
    parts = pl.cdiv(vocab, PART)
    of_block = min(parts, max(1, rows * parts // _BLOCKS))
    layout = layouts.vectors(TILE // device.THREADS)

    def body(logits, largest, limits, counts, wanted, out):
        row, block = lax.axis_index("row"), lax.axis_index("block")

        @pl.when(wanted[row] > 0)
        def _():
            top, is_count = largest[row], counts[row] > 0
            bounds = [limits[row, i] for i in range(num_limits)]
            columns = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout)
            zeros = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), layout)

            def load(start):
                begin = jnp.minimum(start, vocab - TILE)
                x = access.load(logits.at[row, pl.ds(begin, TILE)], layout)
                # Logits of the previous tile become NaN, which is below every limit.
                return jnp.where(columns + begin >= start, x, jnp.nan)

            def add_tiles(start, sums):
                for x in [load(start + i * TILE) for i in range(_TOGETHER)]:
                    mass = jnp.where((x == top) | is_count, 1.0, jnp.exp(x - top))
                    sums = tuple(
                        total + jnp.where(x >= bound, mass, 0.0)
                        for total, bound in zip(sums, bounds, strict=True)
                    )
                return sums

            first = block * of_block

            @pl.loop(first, jnp.minimum(first + of_block, parts))
            def _(part):
                start = part * PART
                times = pl.cdiv(jnp.minimum(vocab - start, PART), _TOGETHER * TILE)
                sums = lax.fori_loop(
                    0,
                    times,
                    lambda i, sums: add_tiles(start + i * (_TOGETHER * TILE), sums),
                    (zeros,) * num_limits,
                )
                for i, total in enumerate(sums):
                    out[row, part, i] = jnp.sum(total)

    kernel = plgpu.kernel(
        body,
        kernel_name="sums_above",
        out_type=jax.ShapeDtypeStruct((rows, parts, num_limits), jnp.float32),
        grid=(rows, pl.cdiv(parts, of_block)),
        grid_names=("row", "block"),
        compiler_params=plgpu.CompilerParams(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    sums = kernel(logits, largest, limits, counts.astype(jnp.int32), wanted.astype(jnp.int32))
    return jnp.where(wanted[:, None, None], sums, 0.0)
