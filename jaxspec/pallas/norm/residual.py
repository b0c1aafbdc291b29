"""Residual stream of a decoder, and the layer output that has not been added to it yet.

A decoder adds the output of each layer to its residual stream, and normalises the sum before the
next layer. On a GPU the addition and the norm are one kernel, so a layer does not add its output
itself. It returns two arrays:

    stream     `[tokens, features]`, in the dtype of the activations
    pending    output of the last layer, which the next norm adds (`add_norm`, `norm_matmul`)

`pending` is None before the first layer. The matmul that ends a layer may return partial sums over
parts of its input features (split-K), which the next addition sums up.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import parallel

Stream = Float[Array, "tokens features"]

# None, features in the dtype of the stream, or float32 partial sums of them.
Pending = Float[Array, "tokens features"] | Float[Array, "parts tokens features"] | None


def sum_parts(
    pending: Float[Array, "*parts tokens features"], dtype: Any
) -> Float[Array, "tokens features"]:
    """Sum partial sums, rounding once to `dtype`; without partial sums, return `pending`."""
    return pending if pending.ndim == 2 else jnp.sum(pending, axis=0).astype(dtype)


def reduced(pending: Pending) -> Pending:
    """Return `pending` summed over the devices of a group, of which each has a part.

    Partial sums of one device are added first: there is less to send.
    """
    if pending is None or not parallel.in_group():
        return pending
    parts = jnp.sum(pending, axis=0, keepdims=True) if pending.ndim == 3 else pending
    return parallel.reduce(parts)


def add(stream: Stream, pending: Pending) -> Stream:
    """Return `stream + pending`, rounded to the dtype of the stream."""
    return stream if pending is None else stream + sum_parts(pending, stream.dtype)
