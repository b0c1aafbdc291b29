"""Softmax of attention's references, with optional sinks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Sinks = Float[Array, " heads"]
"""Score of each query head for attending to nothing; float32."""


def masked_softmax(
    scores: Float[Array, "*rows kv_heads group tokens context"], sinks: Sinks | None
) -> Float[Array, "*rows kv_heads group tokens context"]:
    """Return the softmax over the context; a token whose scores are all -inf gets zeros.

    A head's sink is one more score, whose value is zero (Xiao et al. 2023, "Efficient Streaming
    Language Models with Attention Sinks", arXiv 2309.17453).
    """
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        heads = sinks.reshape((1,) * (scores.ndim - 4) + scores.shape[-4:-2] + (1, 1))
        largest = jnp.maximum(largest, heads)
    # Of a token without scores, replace the maximum by 0, and the sum 0 by 1.
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(heads - largest)
    return weights / jnp.where(total > 0, total, 1.0)
