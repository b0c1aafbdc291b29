"""The kernel of `sums_above` (Pallas, Mosaic GPU): a block has a part of a row."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.selection.sums_above import PART, TILE

_TOGETHER = 2  # tiles whose loads are under way at the same time


@functools.partial(jax.jit, static_argnames="interpret")
def sums_above_kernel(logits, largest, limits, counts, wanted, *, interpret=None):
    """`sums_above`; `interpret` has parameters of Mosaic's interpreter."""
    (rows, vocab), num_limits = logits.shape, limits.shape[1]
    parts = pl.cdiv(vocab, PART)
    layout = layouts.vectors(TILE // device.THREADS)

    def body(logits, largest, limits, counts, wanted, out):
        row, part = lax.axis_index("row"), lax.axis_index("part")

        @pl.when(wanted[row] > 0)
        def _():
            top, is_count = largest[row], counts[row] > 0
            bounds = [limits[row, i] for i in range(num_limits)]
            columns = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout)

            def load(start):
                begin = jnp.minimum(start, vocab - TILE)
                x = access.load(logits.at[row, pl.ds(begin, TILE)], layout)
                # What lies in the tile before, or in the next part, is below every limit.
                return jnp.where(columns + begin >= start, x, jnp.nan)

            def add_tiles(i, sums):
                start = part * PART + i * (_TOGETHER * TILE)
                for x in [load(start + j * TILE) for j in range(_TOGETHER)]:
                    mass = jnp.where((x == top) | is_count, 1.0, jnp.exp(x - top))
                    sums = tuple(
                        total + jnp.where(x >= bound, mass, 0.0)
                        for total, bound in zip(sums, bounds, strict=True)
                    )
                return sums

            times = pl.cdiv(jnp.minimum(vocab - part * PART, PART), _TOGETHER * TILE)
            zeros = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), layout)
            sums = lax.fori_loop(0, times, add_tiles, (zeros,) * num_limits)
            for i, total in enumerate(sums):
                out[row, part, i] = jnp.sum(total)

        @pl.when(wanted[row] == 0)
        def _():
            for i in range(num_limits):
                out[row, part, i] = jnp.float32(0.0)

    kernel = plgpu.kernel(
        body,
        kernel_name="sums_above",
        out_type=jax.ShapeDtypeStruct((rows, parts, num_limits), jnp.float32),
        grid=(rows, parts),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(logits, largest, limits, counts.astype(jnp.int32), wanted.astype(jnp.int32))
