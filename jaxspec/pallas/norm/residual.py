"""The residual stream, and what a layer has put out that is not yet added to it.

A decoder adds the output of each layer to its residual stream, and norms the sum before the next
layer. On a GPU the addition and the norm are one kernel, so a layer does not add its output. It
hands on two things:

    stream     `[tokens, features]`, in the dtype of the activations
    pending    the output of the last layer, which the next norm adds (`add_norm`, `norm_matmul`)

`pending` is None before the first layer. The product that ends a layer may leave it as partial sums
over parts of its features (split-K): whoever adds them sums them up.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

Stream = Float[Array, "tokens features"]

# None, tokens in the dtype of the stream, or float32 partial sums of such tokens.
Pending = Float[Array, "tokens features"] | Float[Array, "parts tokens features"] | None


def sum_parts(
    pending: Float[Array, "*parts tokens features"], dtype: Any
) -> Float[Array, "tokens features"]:
    """The tokens that partial sums make, rounded once to `dtype`; tokens stay as they are."""
    return pending if pending.ndim == 2 else jnp.sum(pending, axis=0).astype(dtype)


def add(stream: Stream, pending: Pending) -> Stream:
    """`stream + pending`, rounded to the dtype of the stream."""
    return stream if pending is None else stream + sum_parts(pending, stream.dtype)
