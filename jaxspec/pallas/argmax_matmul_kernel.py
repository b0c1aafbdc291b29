"""`argmax_matmul` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block scores 128 columns at a time for all rows, as `gemm_kernel` multiplies, and puts out the
best of them; XLA finds the best of all tiles.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import mosaic
from jaxspec.pallas.argmax_matmul import NOTHING
from jaxspec.pallas.gemm_kernel import Tile
from jaxspec.pallas.products import COLUMNS

_PIECES = 2  # of a block
_NONE, _SOUND, _NAN = 0.0, 1.0, 2.0  # nothing finite; something, and no NaN; a NaN


@functools.partial(jax.jit, static_argnames="interpret")
def argmax_matmul_kernel(x, weight, forbidden, *, interpret=None):
    """`argmax_matmul` of up to 128 rows; `interpret`: parameters of Mosaic's interpreter."""
    (rows, inner), ids = x.shape, weight.shape[1]
    never = forbidden.T
    tiles = pl.cdiv(ids, _PIECES * COLUMNS)
    blocks = min(tiles, 2 * mosaic.MULTIPROCESSORS)
    scratch = 128 * rows  # bytes: of less, maxima over a block's threads would take several rounds
    tile = Tile.of(x, rows, _PIECES, inner, blocks, scratch + mosaic.kept(4 * never.size))
    shape = functools.partial(jax.ShapeDtypeStruct, (tiles, rows))
    slots = {"here": plgpu.SMEM(never.shape, jnp.int32)} if never.size else {}
    best, best_ids, sound = plgpu.kernel(
        functools.partial(_block, tile, blocks),
        kernel_name="argmax_matmul",
        out_type=(shape(jnp.float32), shape(jnp.int32), shape(jnp.float32)),
        scratch_types=tile.scratch() | slots,
        grid=(blocks,),
        grid_names=("block",),
        # Safe without barriers but its own.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=scratch
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, weight, never)
    # Of equals the first tile's, whose ids are the lowest.
    first = jnp.argmax(best, axis=0)[None]
    best_ids = jnp.take_along_axis(best_ids, first, axis=0)[0]
    return jnp.where(sound.max(axis=0) == _SOUND, best_ids, NOTHING)


def _block(tile, blocks, x, weight, never, best, best_ids, sound, **scratch):
    """The best of each of a block's tiles for every row, and what else is among their scores."""
    block, layout = lax.axis_index("block"), plgpu.Layout.WGMMA.reduce(0)
    here = scratch.pop("here", None)
    for slot in range(never.shape[0]):  # once, as each tile asks for them
        mosaic.store(plgpu, here.at[slot], mosaic.load(plgpu, never.at[slot], layout))
    plgpu.commit_smem()

    def columns(i):
        first = (block + i * blocks) * (tile.pieces * COLUMNS)
        return [first + piece * COLUMNS for piece in range(tile.pieces)]

    def put_out(i, sums):
        found = _best(sums, columns(i), weight.shape[1], never.shape[0], here)
        for out, values in zip((best, best_ids, sound), found, strict=True):
            mosaic.store(plgpu, out.at[block + i * blocks], values)

    count = lax.div(best.shape[0] - block + blocks - 1, blocks)
    tile.multiply(x, weight, lambda i: (0, 0, columns(i)), put_out, count, **scratch)


def _best(pieces, starts, ids, slots, never):
    """Of all scores of each row: the best, the first column that has it, and what is among them.

    `pieces`: those of `COLUMNS` columns from each of `starts` on. A NaN is of a kind of its own, as
    maxima may lose it. `never`: so many slots of columns that are passed over.
    """
    layout = plgpu.Layout.WGMMA
    here = plgpu.broadcasted_iota(jnp.int32, pieces[0].shape, 0, layout=layout)
    columns = [start + here for start in starts]
    for slot in range(slots):
        one = mosaic.load(plgpu, never.at[slot], layout.reduce(0))
        one = lax.broadcast_in_dim(one, here.shape, (1,))
        pieces = _where(lambda c, one=one: c == one, columns, pieces)
    pieces = _where(lambda c: c >= ids, columns, pieces)

    def most(of_piece):
        """Over pieces first: a maximum over the threads costs more."""
        found = [of_piece(*both) for both in zip(pieces, columns, strict=True)]
        return jnp.max(functools.reduce(jnp.maximum, found), axis=0)

    best = most(lambda x, _: x)
    wide = lax.broadcast_in_dim(best, here.shape, (1,))
    first = -most(lambda x, c: jnp.where(x == wide, -c, -(2**30)))

    def kind(x, _):
        return jnp.where(x != x, _NAN, jnp.where(jnp.abs(x) < jnp.inf, _SOUND, _NONE))

    return best, first, most(kind)


def _where(is_out, columns, pieces):
    """Scores without those of some columns."""
    both = zip(columns, pieces, strict=True)
    return [jnp.where(is_out(c), -jnp.inf, x) for c, x in both]
