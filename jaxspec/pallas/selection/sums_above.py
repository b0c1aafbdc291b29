"""How many logits of a row are at least some limits, or which mass they have."""

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
    """The sums (float32) over the logits of each part of a row that are at least each limit.

    A part has `PART` neighbouring logits, the last one of a row what is left. In rows that `counts`
    a logit adds 1. In the others it adds its mass, `exp(logit - largest)`, where `largest` is the
    row's largest logit, which itself adds 1. A NaN is below every limit. Rows that are not `wanted`
    get zeros, and the kernel does not read them. All but the bools are float32.
    """
    if dispatch.runs_kernel("sums_above", why_not_kernel(logits), rows=logits.shape[0]):
        from jaxspec.pallas.selection.sums_above_kernel import sums_above_kernel

        return sums_above_kernel(logits, largest, limits, counts, wanted)
    return sums_above_reference(logits, largest, limits, counts, wanted)


def sums_above_reference(logits, largest, limits, counts, wanted):
    """The specification of `sums_above`."""
    n, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % PART)), constant_values=jnp.nan)
    x, top = padded.reshape(n, padded.shape[1] // PART, PART), largest[:, None, None]
    mass = jnp.where(x == top, 1.0, jnp.exp(x - top))  # not exp(inf - inf)
    added = jnp.where(counts[:, None, None], 1.0, mass)
    sums = [
        jnp.sum(jnp.where(x >= limit[:, None, None], added, 0.0), axis=2)
        for limit in jnp.moveaxis(limits, 1, 0)
    ]
    return jnp.where(wanted[:, None, None], jnp.stack(sums, axis=2), 0.0)
