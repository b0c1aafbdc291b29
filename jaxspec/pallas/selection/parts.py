"""Parts and tiles into which the kernels split a row of logits, and the rows they accept."""

import jax.numpy as jnp

PART = 8192
"""Adjacent logits per part; a row's last part has the remainder."""

TILE = 512
"""Logits that a kernel loads at a time; a row's last tile may overlap the previous one."""


def why_not_kernel(logits):
    """Return why a kernel that loads tiles cannot take these logits, or None."""
    vocab = logits.shape[1]
    if logits.dtype != jnp.float32 or vocab < TILE or vocab % 4:
        return f"{vocab:,} ids in {logits.dtype}"
    return None
