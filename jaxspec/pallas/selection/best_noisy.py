"""Gumbel-max draw from rows of scores, each row truncated at its last kept id."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.selection.last_kept import LastKept
from jaxspec.pallas.selection.noise import RowKeys, gumbel, random_bits
from jaxspec.pallas.selection.parts import why_not_kernel


def best_noisy(
    scores: Float[Array, "n vocab"],
    keys: RowKeys,
    is_noisy: Bool[Array, " n"],
    last: LastKept,
    wanted: Bool[Array, " n"],
) -> Int[Array, " n"]:
    """Return the column (int32) of the largest score plus noise, the lowest on ties.

    Rows that are not `wanted` return 0, and the kernel does not read them. A row without a finite
    score returns 0 too; a row with a NaN returns an arbitrary column.

    Args:
        scores: float32.
        keys: key of each row's noise.
        is_noisy: rows whose scores get Gumbel noise.
        last: last kept id of each row; no id after it is chosen.
        wanted: rows to compute.
    """
    if dispatch.runs_kernel("best_noisy", why_not_kernel(scores), rows=len(scores)):
        from jaxspec.pallas.selection.best_noisy_kernel import best_noisy_kernel

        return best_noisy_kernel(scores, keys, is_noisy, last, wanted)
    return best_noisy_reference(scores, keys, is_noisy, last, wanted)


def best_noisy_reference(scores, keys, is_noisy, last, wanted):
    ids = jnp.arange(scores.shape[1], dtype=jnp.uint32)[None, :]
    noise = gumbel(random_bits(RowKeys(*(key[:, None] for key in keys)), ids))
    noisy = last.mask(scores) + jnp.where(is_noisy[:, None], noise, 0.0)
    return jnp.where(wanted, jnp.argmax(noisy, axis=1).astype(jnp.int32), 0)
