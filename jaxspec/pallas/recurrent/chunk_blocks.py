"""Chunk walk of recurrent prefills for Mosaic kernels; `chunks` has the XLA version.

Matrices `[t, i]` over a chunk's tokens have the layout of wgmma's accumulator; only elements with
`i <= t` count. Chunks start at multiples of `ALIGN`, as tiled copies require, so a chunk may hold
tokens of other sequences before and after its own.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access
from jaxspec.pallas.recurrent.chunks import CHUNK
from jaxspec.regions import PrefillRegion

ALIGN = 8
VALUES = 64  # rows of a state per block: the M of one wgmma
_MIN_LOG_DECAY = -120.0  # exp of anything lower is 0 in float32


def sequences(chunks: PrefillRegion, num_tokens: int, num_slots: int) -> PrefillRegion:
    """Return the sequences between two null ones, for the tokens before and after them.

    Every token then has an owner, and the kernels write zeros for those of null sequences.
    Sequences that are not live get slot 0.
    """
    first, last = jnp.zeros(1, jnp.int32), jnp.full(1, num_tokens, jnp.int32)
    start = jnp.clip(jnp.concatenate([first, chunks.query_start, last]), 0, num_tokens)
    padded = PrefillRegion(
        slots=jnp.pad(chunks.slots, 1),
        num_computed=jnp.pad(chunks.num_computed, 1),
        query_start=start,
        state_offset=jnp.pad(chunks.state_offset, 1),
    )
    slots = jnp.where(padded.is_live(num_slots), padded.slots, 0)
    return dataclasses.replace(padded, slots=slots)


def iota(dimension):
    """Return `t` (`dimension` 0) or `i` (1) of every element."""
    shape = (CHUNK, CHUNK)
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def along(x, axis):
    """Broadcast a vector over `axis` to a matrix `[CHUNK, CHUNK]`."""
    x = lax.broadcast_in_dim(x, (CHUNK, CHUNK), (axis,))
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def limited(logs):
    """Raise log decays to at least `_MIN_LOG_DECAY`.

    Differences of sums lose digits after a strong decay; the limit keeps that error below 1e-3.
    """
    return jnp.where(logs < _MIN_LOG_DECAY, _MIN_LOG_DECAY, logs)


def sums(logs, t, i):
    """Return the sum of the log decays (along `i`) up to each token `t`."""
    return jnp.sum(jnp.where(i <= t, logs, 0.0), axis=1)


def store(ref, start, low, high, out):
    """Store the outputs `[values, tokens]` of a chunk for tokens `low` to `high` only."""
    whole = high - low == CHUNK

    @pl.when(whole)
    def _():
        # Values are contiguous in memory, and in this layout a thread holds two of them.
        turned = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        access.store(ref.at[pl.ds(start, CHUNK)].transpose((1, 0)), turned)

    @pl.when(jnp.logical_not(whole))
    def _():
        token = plgpu.broadcasted_iota(jnp.int32, out.shape, 1, layout=plgpu.Layout.WGMMA)

        def store_token(t, _):
            row = jnp.sum(jnp.where(token == t, out, 0.0), axis=1)
            access.store(ref.at[start + t], row)

        lax.fori_loop(low, high, store_token, None)


def store_zeros(ref, begin, end):
    zeros = plgpu.layout_cast(jnp.zeros(VALUES, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    lax.fori_loop(begin, end, lambda t, _: access.store(ref.at[t], zeros), None)
