"""What the recurrence of Gated DeltaNet reads: queries, keys, values, decay and write strength."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta import gates as gdn_gates
from jaxspec.pallas.gated_delta.gates import Decay, Gates, gates
from jaxspec.pallas.gpu import access as mosaic
from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.recurrent import conv_update as conv_ops
from jaxspec.pallas.recurrent.conv_update import conv_update, conv_update_reference

_Conv = Float[Array, "layers slots window channels"]
_Keys = Float[Array, "*tokens key_heads key_dim"]
_Values = Float[Array, "*tokens value_heads value_dim"]


EPS = 1e-6  # under the root of a query's or a key's length


class GdnHeads(NamedTuple):
    """How the channels of a convolution divide: queries, as many keys, and the rest values."""

    key_heads: int
    key_dim: int  # of a value head: the channels left over, divided by `value_heads`
    value_heads: int


def gdn_inputs(
    x: Float[Array, "rows width columns"],
    weight: Float[Array, "channels kernel"],
    decay: Decay,
    conv: _Conv,
    layer: int,
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    heads: GdnHeads,
) -> tuple[_Keys, _Keys, _Values, Gates, Gates, _Conv]:
    """Queries, keys and values, log decay and write strength, all float32, and the new pool.

    `x` is a projection as it comes, its columns side by side: the channels of all queries, of all
    keys, of all values; the output gate's, as many as the values', which are not read; and for each
    value head `b` and then for each `a`. The channels go through `conv_update`, whose dtypes,
    padding and errors these are, and `split_qkv`; `b` and `a` through `gates`. Columns behind them
    are not read. ValueError where there are less than that makes.

    One kernel, which reads `x` where it lies, if all heads are of 64 channels or of 128, and the
    channels of all keys, and all channels, multiples of 512.
    """
    conv_ops.check_window(x, weight, conv)
    check_columns(x, weight, heads)
    is_small = weight.shape[0] < 2048  # nobody waits for it
    why = _unsupported(x, weight, conv, heads)
    if dispatch.runs_kernel("gdn_inputs", why, by_choice=is_small):
        index = dispatch.layer_index(conv, layer), slots, num_computed, query_len
        return _gdn_inputs_kernel(x, weight.T, decay, conv, *index, heads)
    qkv, b, a = _columns(x, weight, heads)
    y, conv = conv_update(qkv, weight, conv, layer, slots, num_computed, query_len)
    return *split_qkv(y, heads), *gates(b, a, decay), conv


def gdn_inputs_reference(x, weight, decay, conv, layer, slots, num_computed, query_len, heads):
    """The specification of `gdn_inputs`."""
    qkv, b, a = _columns(x, weight, heads)
    y, conv = conv_update_reference(qkv, weight, conv, layer, slots, num_computed, query_len)
    return *split_qkv(y, heads), *gates(b, a, decay), conv


def check_columns(x, weight, heads):
    """Raise the ValueError of `gdn_inputs`."""
    channels, columns = weight.shape[0], x.shape[2]
    needed = gates_column(channels, heads) + 2 * heads.value_heads
    if columns < needed:
        values = needed - channels - 2 * heads.value_heads
        raise ValueError(
            f"A projection has {channels} channels, {values} columns of the output gate and "
            f"{heads.value_heads} each of b and a, {needed} in all, but this one has {columns}. "
            "Hand over all of it."
        )


def gates_column(channels: int, heads: GdnHeads) -> int:
    """The column of a projection where b begins, behind channels and output gate."""
    return 2 * (channels - heads.key_heads * heads.key_dim)


def _columns(x, weight, heads):
    """The columns of `x` that are read: channels, b, a."""
    first = gates_column(weight.shape[0], heads)
    b, a = (x[..., first + i * heads.value_heads :][..., : heads.value_heads] for i in range(2))
    return x[..., : weight.shape[0]], b, a


def split_qkv(y: Float[Array, "*tokens channels"], heads: GdnHeads) -> tuple[_Keys, _Keys, _Values]:
    """Float32 queries, keys and values of a convolution's output.

    Queries and keys have length 1 in each head, with `EPS` under the root as published, and queries
    are scaled by `key_dim ** -0.5`.
    """
    key_heads, key_dim, value_heads = heads
    keys = key_heads * key_dim
    parts = jnp.split(y.astype(jnp.float32), [keys, 2 * keys], axis=-1)
    counts = key_heads, key_heads, value_heads
    q, k, v = (part.reshape(*y.shape[:-1], n, -1) for part, n in zip(parts, counts, strict=True))
    return _normalise(q) * key_dim**-0.5, _normalise(k), v


def _normalise(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


_CHANNELS = 512  # of a block: four a thread, so that one warp has whole heads


def _unsupported(x, weight, conv, heads):
    """Why `_gdn_inputs_kernel` does not take these operands, or None."""
    key_heads, key_dim, value_heads = heads
    keys, channels = key_heads * key_dim, weight.shape[0]
    if key_dim not in (64, 128) or channels - 2 * keys != value_heads * key_dim:
        return f"heads of {key_dim} and {(channels - 2 * keys) // value_heads}, not all 64 or 128"
    if keys % _CHANNELS or channels % _CHANNELS:
        return f"{keys} channels of keys among {channels}"
    return conv_ops.unsupported(x, weight, conv)


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def _gdn_inputs_kernel(
    x, taps, decay, conv, layer, slots, num_computed, query_len, heads, *, interpret=None
):
    """`gdn_inputs` on a Hopper GPU, with `taps` `[kernel, channels]`.

    A block has some whole heads of a row, and the last the row's gates. `interpret`: parameters of
    Mosaic's interpreter.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    key_heads, key_dim, value_heads = heads
    rows, width, _ = x.shape
    first = gates_column(conv.shape[3], heads)
    size, blocks = _CHANNELS // key_dim, conv.shape[3] // _CHANNELS

    def body(x, decay, *refs):
        *operands, q, k, v, g, beta = refs
        row, part = lax.axis_index("row"), lax.axis_index("part")

        @pl.when(part < blocks)
        def _():
            # Four channels a thread: a head of 128 is one warp's, and its sum needs no other.
            layout = layouts.row_layout(plgpu, key_dim, itemsize=4, most_lanes=32)
            channels = pl.ds(part * _CHANNELS, _CHANNELS)
            # Where a token begins is no multiple of a head: its columns are cut, not the whole.
            new = [x.at[row, t, channels].reshape(size, key_dim) for t in range(width)]
            new = [mosaic.load(plgpu, token, layout) for token in new]
            put = functools.partial(_put_heads, plgpu, (q, k, v), x.dtype)
            conv_ops.convolve(plgpu, new, operands, pl.ds(part * size, size), layout, put)

        @pl.when(part == blocks)
        def _():
            _put_gates(plgpu, x, first, decay, g, beta)

    of_keys = jax.ShapeDtypeStruct((rows, width, key_heads, key_dim), jnp.float32)
    of_values = jax.ShapeDtypeStruct((rows, width, value_heads, key_dim), jnp.float32)
    of_gates = jax.ShapeDtypeStruct((rows, width, value_heads), jnp.float32)
    taps, pool = (a.reshape(*a.shape[:-1], -1, key_dim) for a in (taps, conv))
    operands = x, decay, taps, layer[None], slots, num_computed, query_len
    outputs, pool = conv_ops.launch(
        plgpu, body, operands, pool, (of_keys, of_keys, of_values, of_gates, of_gates),
        (blocks + 1, rows), interpret,
    )  # fmt: skip
    return *outputs, pool.reshape(conv.shape)


def _put_heads(plgpu, outputs, dtype, t, y):
    """Write a block's heads of token `t`, the convolution's `y`, to queries, keys or values."""
    from jax.experimental import pallas as pl

    q, k, v = outputs
    row, part = lax.axis_index("row"), lax.axis_index("part")
    size, key_dim = y.shape
    key_blocks = k.shape[2] // size
    y = y.astype(dtype).astype(jnp.float32)  # as `conv_update` gives it

    def write(out, first, values):
        block = pl.ds((part - first) * size, size)
        mosaic.store(plgpu, out.at[row, t, block], values)

    @pl.when(part < 2 * key_blocks)
    def _():
        scale = lax.rsqrt(jnp.sum(y * y, axis=1) + EPS)
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


def _put_gates(plgpu, x, first, decay, g, beta):
    """Write `gates` of a row's tokens, whose `b` and then `a` begin at column `first` of `x`."""
    from jax.experimental import pallas as pl

    row, (width, heads) = lax.axis_index("row"), g.shape[1:]
    layout = layouts.lane_layout(plgpu, heads)

    def load(ref):
        return mosaic.load(plgpu, ref, layout).astype(jnp.float32)

    b = [load(x.at[row, t, pl.ds(first, heads)]) for t in range(width)]
    a = [load(x.at[row, t, pl.ds(first + heads, heads)]) for t in range(width)]
    of_decay = [load(decay.at[:, column]) for column in range(2)]
    for t in range(width):
        log_decay, strength = gdn_gates.in_kernel(b[t], a[t], *of_decay)
        mosaic.store(plgpu, g.at[row, t], log_decay)
        mosaic.store(plgpu, beta.at[row, t], strength)
