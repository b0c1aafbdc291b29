"""Inputs of Gated DeltaNet's recurrence (`GdnTokens`) from a layer's projection."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import (
    BLOCK_CHANNELS,
    EPS,
    GdnHeads,
    GdnParams,
    GdnTokens,
    Keys,
    Values,
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
    is_toy = params.conv.shape[1] < 2048  # smaller than any published model: no warning
    why, num_rows = _why_not_kernel(projected, params, conv), projected.shape[0]
    if dispatch.runs_kernel("gdn_inputs", why, rows=num_rows, by_choice=is_toy):
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


def _why_not_kernel(projected, params, conv):
    key_heads, key_dim, value_heads = params.heads
    keys, channels = key_heads * key_dim, params.conv.shape[1]
    if key_dim not in (64, 128) or channels - 2 * keys != value_heads * key_dim:
        return f"heads of {key_dim} and {(channels - 2 * keys) // value_heads}, not all 64 or 128"
    if keys % BLOCK_CHANNELS or channels % BLOCK_CHANNELS:
        return f"{keys} channels of keys among {channels}, not multiples of {BLOCK_CHANNELS}"
    return why_not_convolve(projected, params.conv, conv)
