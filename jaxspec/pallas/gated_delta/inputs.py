"""Inputs of the gated delta rule (`GdnTokens`) from a layer's projection."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import (
    BLOCK_CHANNELS,
    EPS,
    ChannelParams,
    GdnHeads,
    GdnParams,
    GdnTokens,
    Keys,
    Values,
    channel_gates,
    gates,
    gates_column,
)
from jaxspec.pallas.recurrent.conv_ring import ConvPool
from jaxspec.pallas.recurrent.conv_update import (
    check_window,
    conv_update,
    conv_update_reference,
    why_not_convolve,
)
from jaxspec.regions import DecodeRegion


def gdn_inputs(
    projected: Float[Array, "rows width columns"],
    params: GdnParams,
    conv: ConvPool,
    layer: int,
    rows: DecodeRegion,
) -> tuple[GdnTokens, ConvPool]:
    """Compute the recurrence's float32 tokens from a projection; also return the convolution pool.

    `projected` is a whole projection, with these columns in order:

        channels     of all queries, all keys, all values: convolved by `conv_update`, then split
                     into heads by `split_qkv`
        output gate  as many columns as the values; not read
        b, a         one column each per value head; turned into beta and g by `gates`

    Columns after these are not read. Dtypes, padding and errors of the convolution are those of
    `conv_update`.

    One kernel reads the projection in place if all heads have 64 channels or all have 128, and if
    the channels of all keys, and all channels together, are multiples of 512.

    Raises:
        ValueError: `projected` has too few columns.
    """
    check_window(projected, params.conv, conv)
    check_columns(projected, params)
    if _runs_kernel("gdn_inputs", projected, params.conv, params.heads, conv):
        from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_kernel

        taps, decay, heads = params
        on_device = dispatch.layer_index(conv, layer)
        return gdn_inputs_kernel(projected, taps, decay, conv, on_device, rows, heads)
    qkv, b, a = _columns(projected, params)
    y, conv = conv_update(qkv, params.conv, conv, layer, rows)
    return GdnTokens(*split_qkv(y, params.heads), *gates(b, a, params.decay)), conv


def gdn_inputs_reference(projected, params, conv, layer, rows):
    qkv, b, a = _columns(projected, params)
    y, conv = conv_update_reference(qkv, params.conv, conv, layer, rows)
    return GdnTokens(*split_qkv(y, params.heads), *gates(b, a, params.decay)), conv


def gdn_inputs_by_channel(
    projected: Float[Array, "rows width columns"],
    f: Float[Array, "rows width f_columns"],
    params: ChannelParams,
    conv: ConvPool,
    layer: int,
    rows: DecodeRegion,
) -> tuple[GdnTokens, ConvPool]:
    """Compute the recurrence's float32 tokens, with a decay by channel, from a projection.

    Dtypes and padding are those of `gdn_inputs`, and so are the conditions of the kernel. It also
    needs `params.f_column` and the number of columns of `f` to be multiples of 4, and reads both
    arrays in place.

    Args:
        projected: A whole projection. Its first columns are the channels, as in `gdn_inputs`; b has
            a column per head, from `params.b_column` on. Other columns are not read.
        f: The inputs of the log decays (`channel_gates`), one per head and key channel, from
            `params.f_column` on; it may be the projection.
        params: Parameters of the layer.
        conv: The pool of the convolution.
        layer: The layer in the pool.
        rows: The decode region.

    Returns:
        The tokens, and the pool after the step.

    Raises:
        ValueError: An array has too few columns, or keys have another number of heads than values.
    """
    check_window(projected, params.conv, conv)
    check_columns_by_channel(projected, f, params)
    why = why_not_load_decays(f, params)
    if _runs_kernel("gdn_inputs_by_channel", projected, params.conv, params.heads, conv, why):
        from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_by_channel_kernel

        return gdn_inputs_by_channel_kernel(
            projected,
            f,
            params.conv,
            (params.log_rate, params.bias),
            conv,
            dispatch.layer_index(conv, layer),
            rows,
            params.heads,
            f_column=params.f_column,
            b_column=params.b_column,
            lower_bound=params.lower_bound,
        )
    channels = projected[..., : params.conv.shape[1]]
    y, conv = conv_update(channels, params.conv, conv, layer, rows)
    return tokens_by_channel(y, projected, f, params), conv


def gdn_inputs_by_channel_reference(projected, f, params, conv, layer, rows):
    channels = projected[..., : params.conv.shape[1]]
    y, conv = conv_update_reference(channels, params.conv, conv, layer, rows)
    return tokens_by_channel(y, projected, f, params), conv


def tokens_by_channel(
    y: Float[Array, "*tokens channels"],
    projected: Float[Array, "*tokens columns"],
    f: Float[Array, "*tokens f_columns"],
    params: ChannelParams,
) -> GdnTokens:
    """Return the tokens of `gdn_inputs_by_channel`, given the convolution's output `y`."""
    q, k, v = split_qkv(y, params.heads)
    f = f[..., params.f_column :][..., : params.heads.value_heads * params.heads.key_dim]
    g = channel_gates(f.reshape(v.shape), params.log_rate, params.bias, params.lower_bound)
    b = projected[..., params.b_column :][..., : params.heads.value_heads]
    return GdnTokens(q, k, v, g, jax.nn.sigmoid(b.astype(jnp.float32)))


def check_columns_by_channel(
    projected: Float[Array, "rows width columns"],
    f: Float[Array, "rows width f_columns"],
    params: ChannelParams,
) -> None:
    key_heads, key_dim, value_heads = params.heads
    if key_heads != value_heads:
        raise ValueError(
            f"A decay by channel needs as many heads of keys as of values, got {key_heads} and "
            f"{value_heads}. Use gdn_inputs, whose decay is one number per head."
        )
    ends = {
        "projection": (projected, params.b_column + value_heads),
        "f": (f, params.f_column + value_heads * key_dim),
    }
    for name, (x, needed) in ends.items():
        if x.shape[-1] < needed:
            raise ValueError(
                f"{name} needs at least {needed} columns for {value_heads} heads, got "
                f"{x.shape[-1]}. Pass the whole array."
            )


def check_columns(projected: Float[Array, "rows width columns"], params: GdnParams) -> None:
    heads, channels, columns = params.heads, params.conv.shape[1], projected.shape[2]
    needed = gates_column(channels, heads) + 2 * heads.value_heads
    if columns < needed:
        values = needed - channels - 2 * heads.value_heads
        raise ValueError(
            f"A projection has {channels} channels, {values} columns of the output gate and "
            f"{heads.value_heads} each of b and a, {needed} in all, but this one has {columns}. "
            "Pass the whole projection."
        )


def _columns(projected, params):
    """Return the columns that are read: channels, b, a."""
    channels, count = params.conv.shape[1], params.heads.value_heads
    first = gates_column(channels, params.heads)
    b, a = projected[..., first:][..., :count], projected[..., first + count :][..., :count]
    return projected[..., :channels], b, a


def split_qkv(y: Float[Array, "*tokens channels"], heads: GdnHeads) -> tuple[Keys, Keys, Values]:
    """Split a convolution's output into float32 queries, keys and values.

    Queries and keys are normalised to length 1 in each head, with `EPS` under the root as
    published, and queries are scaled by `key_dim ** -0.5`.
    """
    key_heads, key_dim, value_heads = heads
    keys = key_heads * key_dim
    parts = jnp.split(y.astype(jnp.float32), [keys, 2 * keys], axis=-1)
    counts = key_heads, key_heads, value_heads
    q, k, v = (
        part.reshape(*y.shape[:-1], n, part.shape[-1] // n)
        for part, n in zip(parts, counts, strict=True)
    )
    return _normalise(q) * key_dim**-0.5, _normalise(k), v


def _normalise(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def _runs_kernel(op, projected, taps, heads, conv, why=None):
    is_toy = taps.shape[1] < 2048  # smaller than any published model: no warning
    why = _why_not_kernel(projected, taps, heads, conv) or why
    return dispatch.runs_kernel(op, why, rows=projected.shape[0], by_choice=is_toy)


def why_not_load_decays(f, params):
    if f.shape[-1] % 4 or params.f_column % 4:  # a thread loads four of them at a time
        return f"f from column {params.f_column} of {f.shape[-1]}, not both multiples of 4"
    return None


def _why_not_kernel(projected, taps, heads, conv):
    key_heads, key_dim, value_heads = heads
    keys, channels = key_heads * key_dim, taps.shape[1]
    if key_dim not in (64, 128) or channels - 2 * keys != value_heads * key_dim:
        return f"heads of {key_dim} and {(channels - 2 * keys) // value_heads}, not all 64 or 128"
    if keys % BLOCK_CHANNELS or channels % BLOCK_CHANNELS:
        return f"{keys} channels of keys among {channels}, not multiples of {BLOCK_CHANNELS}"
    if projected.shape[-1] % 4:  # a thread loads four channels at a time
        return f"{projected.shape[-1]} columns, not a multiple of 4"
    return why_not_convolve(projected, taps, conv)
