"""How the kernels cut a row of logits into parts and tiles, and which rows they take."""

import jax.numpy as jnp

PART = 8192
"""Neighbouring logits of a part; the last one of a row has what is left."""

TILE = 512
"""Logits that a kernel loads at a time; a row's last tile may overlap the one before."""


def why_not_kernel(logits):
    """Return why a kernel that loads tiles does not take these rows of logits, or None."""
    vocab = logits.shape[1]
    if logits.dtype != jnp.float32 or vocab < TILE or vocab % 4:
        return f"{vocab:,} ids in {logits.dtype}"
    return None
