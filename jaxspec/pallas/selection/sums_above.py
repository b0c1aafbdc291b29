"""Number of a row's logits that reach a limit, or their probability mass, for several limits."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.selection.parts import PART, why_not_kernel


def sums_above(
    logits: Float[Array, "n vocab"],
    largest: Float[Array, " n"],
    limits: Float[Array, "n limits"],
    counts: Bool[Array, " n"],
    wanted: Bool[Array, " n"],
) -> Float[Array, "n parts limits"]:
    """Return, for each part of a row, sums (float32) over its logits that are at least each limit.

    A part has `PART` adjacent logits; a row's last part has the remainder. A NaN is below every
    limit.

    Args:
        logits: float32.
        largest: largest logit of each row (float32).
        limits: float32.
        counts: rows in which each logit adds 1. In the other rows it adds its mass, `exp(logit -
            largest)`, which is 1 for the largest.
        wanted: rows to compute. The others return zeros, and the kernel does not read them.
    """
    if dispatch.runs_kernel("sums_above", why_not_kernel(logits), rows=logits.shape[0]):
        from jaxspec.pallas.selection.sums_above_kernel import sums_above_kernel

        return sums_above_kernel(logits, largest, limits, counts, wanted)
    return sums_above_reference(logits, largest, limits, counts, wanted)


def sums_above_reference(logits, largest, limits, counts, wanted):
    n, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % PART)), constant_values=jnp.nan)
    x, top = padded.reshape(n, padded.shape[1] // PART, PART), largest[:, None, None]
    mass = jnp.where(x == top, 1.0, jnp.exp(x - top))  # avoids exp(inf - inf)
    added = jnp.where(counts[:, None, None], 1.0, mass)
    sums = [
        jnp.sum(jnp.where(x >= limit[:, None, None], added, 0.0), axis=2)
        for limit in jnp.moveaxis(limits, 1, 0)
    ]
    return jnp.where(wanted[:, None, None], jnp.stack(sums, axis=2), 0.0)
