"""What the recurrence of Gated DeltaNet reads: a convolution cut into heads, q and k normalised."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import conv_update as conv_ops
from jaxspec.pallas import dispatch, mosaic
from jaxspec.pallas.conv_update import conv_update, conv_update_reference

_Conv = Float[Array, "layers slots window channels"]
_Keys = Float[Array, "*tokens key_heads key_dim"]
_Values = Float[Array, "*tokens value_heads value_dim"]


class GdnHeads(NamedTuple):
    """How the channels of a convolution divide: queries, as many keys, and the rest values."""

    key_heads: int
    key_dim: int  # of a value head: the channels left over, divided by `value_heads`
    value_heads: int


def gdn_qkv(
    x: Float[Array, "rows width channels"],
    weight: Float[Array, "channels kernel"],
    conv: _Conv,
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    heads: GdnHeads,
) -> tuple[_Keys, _Keys, _Values, _Conv]:
    """`conv_update`, then `split_qkv`: float32 queries, keys and values, and the new pool.

    One kernel instead of four where all heads are of one size. `x` holds the channels of all
    queries, then of all keys, then of all values; dtypes, padding and errors are `conv_update`'s.
    """
    conv_ops.check_window(x, weight, conv)
    if dispatch.runs_kernel("gdn_qkv", _unsupported(x, weight, conv, heads)):
        index = dispatch.layer_index(conv, layer), slots, state_offset, query_len
        return _gdn_qkv_kernel(x, weight.T, conv, *index, heads)
    y, conv = conv_update(x, weight, conv, layer, slots, state_offset, query_len)
    return *split_qkv(y, heads), conv


def gdn_qkv_reference(x, weight, conv, layer, slots, state_offset, query_len, heads):
    """The specification of `gdn_qkv`."""
    y, conv = conv_update_reference(x, weight, conv, layer, slots, state_offset, query_len)
    return *split_qkv(y, heads), conv


def split_qkv(y: Float[Array, "*tokens channels"], heads: GdnHeads) -> tuple[_Keys, _Keys, _Values]:
    """Float32 queries, keys and values of a convolution's output.

    Queries and keys have length 1 in each head, with 1e-6 under the root as published, and queries
    are scaled by `key_dim ** -0.5`.
    """
    key_heads, key_dim, value_heads = heads
    keys = key_heads * key_dim
    parts = jnp.split(y.astype(jnp.float32), [keys, 2 * keys], axis=-1)
    counts = key_heads, key_heads, value_heads
    q, k, v = (part.reshape(*y.shape[:-1], n, -1) for part, n in zip(parts, counts, strict=True))
    return _normalise(q) * key_dim**-0.5, _normalise(k), v


def _normalise(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


_CHANNELS = 512  # of a block: four a thread, so that one warp has whole heads


def _unsupported(x, weight, conv, heads):
    """Why `_gdn_qkv_kernel` does not take these operands, or None."""
    key_heads, key_dim, value_heads = heads
    keys, channels = key_heads * key_dim, x.shape[2]
    if key_dim not in (64, 128) or channels - 2 * keys != value_heads * key_dim:
        return f"heads of {key_dim} and {(channels - 2 * keys) // value_heads}, not all 64 or 128"
    if keys % _CHANNELS or channels % _CHANNELS:
        return f"{keys} channels of keys among {channels}"
    return conv_ops.unsupported(x, weight, conv)


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def _gdn_qkv_kernel(x, taps, conv, layer, slots, state_offset, query_len, heads, *, interpret=None):
    """`gdn_qkv` on a Hopper GPU, with `taps` `[kernel, channels]`; a block has some whole heads.

    `interpret`: parameters of Mosaic's interpreter.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    key_heads, key_dim, value_heads = heads
    rows, width, channels = x.shape
    size, key_blocks = _CHANNELS // key_dim, key_heads * key_dim // _CHANNELS
    # Four channels a thread: a head of 128 is one warp's, and its sum needs no other.
    layout = mosaic.row_layout(plgpu, key_dim, itemsize=4, most_lanes=32)

    def body(*refs):
        *operands, q, k, v = refs
        row, part = lax.axis_index("row"), lax.axis_index("part")

        def put(t, y):
            y = y.astype(x.dtype).astype(jnp.float32)  # as `conv_update` gives it

            def write(out, first, values):
                block = pl.ds((part - first) * size, size)
                mosaic.store(plgpu, out.at[row, t, block], values)

            @pl.when(part < 2 * key_blocks)
            def _():
                scale = lax.rsqrt(jnp.sum(y * y, axis=1) + 1e-6)
                unit = y * lax.broadcast_in_dim(scale, y.shape, (0,))

                @pl.when(part < key_blocks)
                def _():
                    write(q, 0, unit * key_dim**-0.5)

                @pl.when(part >= key_blocks)
                def _():
                    write(k, key_blocks, unit)

            @pl.when(part >= 2 * key_blocks)
            def _():
                write(v, 2 * key_blocks, y)

        conv_ops.convolve(plgpu, operands, pl.ds(part * size, size), layout, put)

    of_keys = jax.ShapeDtypeStruct((rows, width, key_heads, key_dim), jnp.float32)
    of_values = jax.ShapeDtypeStruct((rows, width, value_heads, key_dim), jnp.float32)
    x, taps, pool = (a.reshape(*a.shape[:-1], -1, key_dim) for a in (x, taps, conv))
    index = layer[None], slots, state_offset, query_len
    outputs, pool = conv_ops.launch(
        plgpu, body, (x, taps, *index), pool, (of_keys, of_keys, of_values),
        (rows, channels // _CHANNELS), interpret,
    )  # fmt: skip
    return *outputs, pool.reshape(conv.shape)
