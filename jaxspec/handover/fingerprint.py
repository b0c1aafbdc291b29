"""Fingerprint: which model an engine runs, with which weights and in which dtype."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_VALUES = 256  # of each leaf


def fingerprint(config: Any, leaves: Sequence[Array]) -> str:
    """64 hexadecimal digits, the same where two engines have the same model, as a sample tells.

    They are a SHA-256 of the model's configuration, of the shape and dtype of every leaf of its
    weights, and of values at even distances in each. A checkpoint that was trained on differs in
    nearly all values, so it gets another one. The sizes of an engine play no part, nor do drafters
    with weights of their own.

    `config`: whatever is written the same way for the same model. Waits for the device.
    """
    digest = hashlib.sha256(repr(config).encode())
    digest.update(repr([(leaf.shape, leaf.dtype.name) for leaf in leaves]).encode())
    digest.update(np.asarray(_sampled(tuple(leaves))).tobytes())
    return digest.hexdigest()


@jax.jit
def _sampled(leaves: tuple[Array, ...]) -> Float[Array, " values"]:
    """At most twice `_VALUES` of each leaf, end to end."""
    flat = [leaf.reshape(-1) for leaf in leaves]
    parts = [leaf[:: max(1, leaf.size // _VALUES)].astype(jnp.float32) for leaf in flat]
    return jnp.concatenate([*parts, jnp.zeros(0, jnp.float32)])
