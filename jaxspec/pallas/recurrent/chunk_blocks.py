"""What the prefill kernels of recurrent layers share; import only where kernels run.

Matrices over a chunk's tokens have the layout of what wgmma puts out, `[t, i]`: `i` at or before
`t` counts. Chunks start at multiples of `ALIGN`, which tiled copies need, hence with tokens of
others in front, and may end with others' behind.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access
from jaxspec.pallas.recurrent.chunks import CHUNK

ALIGN = 8
VALUES = 64  # rows of a state in one block, what wgmma takes
_LEAST = -120.0  # a log decay below it is 0 in float32 as well


def sequences(tokens, query_start, slots, *others):
    """Where sequences begin and end, with their slots and the others.

    Tokens of no sequence become sequences of the null slot, which the kernels fill with zeros.
    """
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), query_start, jnp.full(1, tokens, jnp.int32)])
    edges = jnp.clip(edges, 0, tokens)
    return edges, *(jnp.pad(x, 1) for x in (slots, *others))


def iota(dimension):
    """`t` (`dimension` 0) or `i` (1) of every element."""
    shape = (CHUNK, CHUNK)
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def along(x, axis):
    """A vector over `axis` of a matrix of `CHUNK` rows and columns."""
    x = lax.broadcast_in_dim(x, (CHUNK, CHUNK), (axis,))
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def limited(logs):
    """Log decays, none beyond what leaves nothing at all.

    A difference of sums loses what follows a strong decay; this keeps that below 1e-3.
    """
    return jnp.where(logs < _LEAST, _LEAST, logs)


def sums(logs, t, i):
    """The sums up to each token of log decays along `i`."""
    return jnp.sum(jnp.where(i <= t, logs, 0.0), axis=1)


def store(ref, start, low, high, out):
    """The outputs `[values, tokens]` of a chunk's tokens from `low` to `high`, and no others."""
    whole = high - low == CHUNK

    @pl.when(whole)
    def _():
        # Values are neighbours in memory, and in this layout a thread has two.
        turned = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        access.store(ref.at[pl.ds(start, CHUNK)].transpose((1, 0)), turned)

    @pl.when(jnp.logical_not(whole))
    def _():
        place = plgpu.broadcasted_iota(jnp.int32, out.shape, 1, layout=plgpu.Layout.WGMMA)

        def one(t, _):
            row = jnp.sum(jnp.where(place == t, out, 0.0), axis=1)
            access.store(ref.at[start + t], row)

        lax.fori_loop(low, high, one, None)


def store_nothing(ref, begin, end):
    """Zeros for the tokens from `begin` to `end`."""
    nothing = plgpu.layout_cast(jnp.zeros(VALUES, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    lax.fori_loop(begin, end, lambda t, _: access.store(ref.at[t], nothing), None)
