"""Fingerprint of a model: its architecture, weights and dtype."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_VALUES = 256  # sampled values per leaf


def fingerprint(config: Any, leaves: Sequence[Array]) -> str:
    """Return 64 hexadecimal digits that are equal for engines with the same model.

    They are the SHA-256 of the model's configuration, the shapes and dtypes of its weights, and a
    regular sample of values of each weight. Further training changes nearly all values, and with
    them the fingerprint. Engine sizes and separately loaded drafters are not included.

    Waits for the device.

    Args:
        config: Any object whose repr is the same for the same model.
        leaves: The weights.
    """
    digest = hashlib.sha256(repr(config).encode())
    digest.update(repr([(leaf.shape, leaf.dtype.name) for leaf in leaves]).encode())
    digest.update(np.asarray(_sampled(tuple(leaves))).tobytes())
    return digest.hexdigest()


@jax.jit
def _sampled(leaves: tuple[Array, ...]) -> Float[Array, " values"]:
    """Return at most twice `_VALUES` values of each leaf, concatenated."""
    flat = [leaf.reshape(-1) for leaf in leaves]
    parts = [leaf[:: max(1, leaf.size // _VALUES)].astype(jnp.float32) for leaf in flat]
    return jnp.concatenate([*parts, jnp.zeros(0, jnp.float32)])
