"""What the recurrence of Gated DeltaNet reads: queries, keys, values, decay and write strength."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.gates import Decay, Gates, gates
from jaxspec.pallas.gated_delta.heads import _CHANNELS, EPS, GdnHeads, gates_column
from jaxspec.pallas.recurrent import conv_update as conv_ops
from jaxspec.pallas.recurrent.conv_update import conv_update, conv_update_reference

_Conv = Float[Array, "layers slots window channels"]
_Keys = Float[Array, "*tokens key_heads key_dim"]
_Values = Float[Array, "*tokens value_heads value_dim"]


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
        from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_kernel

        index = dispatch.layer_index(conv, layer), slots, num_computed, query_len
        return gdn_inputs_kernel(x, weight.T, decay, conv, *index, heads)
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


def _unsupported(x, weight, conv, heads):
    """Why `gdn_inputs_kernel` does not take these operands, or None."""
    key_heads, key_dim, value_heads = heads
    keys, channels = key_heads * key_dim, weight.shape[0]
    if key_dim not in (64, 128) or channels - 2 * keys != value_heads * key_dim:
        return f"heads of {key_dim} and {(channels - 2 * keys) // value_heads}, not all 64 or 128"
    if keys % _CHANNELS or channels % _CHANNELS:
        return f"{keys} channels of keys among {channels}"
    return conv_ops.unsupported(x, weight, conv)
