"""Inputs of Mamba2's recurrence, `Mamba2Tokens`, computed from a layer's projection."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.heads import BLOCK_CHANNELS, Mamba2Params, Mamba2Tokens, key_block
from jaxspec.pallas.recurrent.conv_ring import ConvPool
from jaxspec.pallas.recurrent.conv_update import (
    check_window,
    conv_update,
    conv_update_reference,
    why_not_convolve,
)
from jaxspec.regions import DecodeRegion


def mamba2_inputs(
    projected: Float[Array, "rows width columns"],
    params: Mamba2Params,
    conv: ConvPool,
    layer: int,
    rows: DecodeRegion,
) -> tuple[Mamba2Tokens, ConvPool]:
    """Return the recurrence's tokens and the new convolution pool.

    `projected` is a whole projection; `Mamba2Heads` lists its columns. The channels go through
    `conv_update` with its bias, and keep their dtype; `split_tokens` turns the step sizes into
    `dt`. The gate z and the padding are not read. Dtypes, padding and errors of the convolution are
    those of `conv_update`.

    One kernel reads the projection without a copy if x has a multiple of 256 channels, and B and C
    each have a multiple of 128.

    Raises:
        ValueError: `projected` has too few columns, or the taps do not match the heads.
    """
    check_window(projected, params.conv, conv)
    check_columns(projected, params)
    is_toy = params.heads.channels < 1536  # smaller than published models: no warning
    why, num_rows = _why_not_kernel(projected, params, conv), projected.shape[0]
    if dispatch.runs_kernel("mamba2_inputs", why, rows=num_rows, by_choice=is_toy):
        from jaxspec.pallas.mamba2.inputs_kernel import mamba2_inputs_kernel

        return mamba2_inputs_kernel(
            projected, params, conv, dispatch.layer_index(conv, layer), rows
        )
    y, conv = conv_update(
        projected[..., : params.heads.channels], params.conv, conv, layer, rows, bias=params.bias
    )
    return split_tokens(y, _steps(projected, params), params), conv


def mamba2_inputs_reference(projected, params, conv, layer, rows):
    y, conv = conv_update_reference(
        projected[..., : params.heads.channels], params.conv, conv, layer, rows, bias=params.bias
    )
    return split_tokens(y, _steps(projected, params), params), conv


def check_columns(projected: Float[Array, "*tokens columns"], params: Mamba2Params) -> None:
    heads, columns, taps = params.heads, projected.shape[-1], params.conv.shape[1]
    if taps != heads.channels:
        raise ValueError(
            f"The convolution of {heads} has {heads.channels} channels, but the taps are for "
            f"{taps}. Give the taps of x, B and C side by side."
        )
    if columns < heads.columns:
        raise ValueError(
            f"A projection has {heads.channels} channels, {heads.features} columns of the gate and "
            f"{heads.heads} step sizes, {heads.columns} in all, but this one has {columns}. "
            "Pass the whole projection."
        )


def _why_not_kernel(projected, params, conv):
    heads = params.heads
    keys = heads.groups * heads.state_dim
    if heads.features % BLOCK_CHANNELS or keys % key_block(heads):
        return f"{heads.features} channels of x and {keys} of B, not multiples of 256 and 128"
    return why_not_convolve(projected, params.conv, conv)


def _steps(projected, params):
    heads = params.heads
    return projected[..., heads.steps_column : heads.columns]


def split_tokens(
    y: Float[Array, "*tokens channels"], steps: Float[Array, "*tokens heads"], params: Mamba2Params
) -> Mamba2Tokens:
    """Return the tokens for a convolution's output and the projection's step sizes.

    `x`, `B` and `C` keep the dtype of `y`. The rest is float32: `dt = softplus(steps + dt_bias)`,
    `A = -exp(A_log)` and `D` (Dao and Gu 2024, arXiv 2405.21060). `dt` is never clamped.
    """
    heads, tokens = params.heads, y.shape[:-1]
    a_log, dt_bias, d = (params.rates[:, column] for column in range(3))
    x, b, c = jnp.split(
        y, [heads.features, heads.features + heads.groups * heads.state_dim], axis=-1
    )
    return Mamba2Tokens(
        x=x.reshape(*tokens, heads.heads, heads.head_dim),
        dt=jax.nn.softplus(steps.astype(jnp.float32) + jnp.broadcast_to(dt_bias, steps.shape)),
        a=-jnp.exp(a_log),
        b=b.reshape(*tokens, heads.groups, heads.state_dim),
        c=c.reshape(*tokens, heads.groups, heads.state_dim),
        d=d,
    )
