"""Bit masks over the vocabulary: 32 tokens per word, the lowest bit first."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def is_set(words: Int[Array, "n words"], vocab_size: int) -> Bool[Array, "n vocab"]:
    """Return the bit of each token."""
    place = jnp.arange(32, dtype=jnp.int32)[None, None, :]
    rows, num_words = words.shape
    bits = (words[:, :, None] >> place).reshape(rows, 32 * num_words) & 1
    return bits[:, :vocab_size] == 1
