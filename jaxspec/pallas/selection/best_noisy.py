"""The Gumbel-max draw from rows of scores, each up to its last kept id."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.selection.noise import RowKeys, gumbel, random_bits
from jaxspec.pallas.selection.parts import TILE


class LastKept(NamedTuple):
    """The last id that each row keeps, in the order of its logits; of equal ones the lower first.

    It says of every other id whether it is kept, so nothing is scattered back.
    """

    logit: Float[Array, " n"]
    id: Int[Array, " n"]  # int32

    @staticmethod
    def none(n: int) -> "LastKept":
        """Keep every id."""
        return LastKept(jnp.full(n, -jnp.inf), jnp.full(n, jnp.iinfo(jnp.int32).max, jnp.int32))

    def where(self, chosen: Bool[Array, " n"], other: "LastKept") -> "LastKept":
        """Return this one in the rows that are `chosen`, and `other` elsewhere."""
        return LastKept(*(jnp.where(chosen, a, b) for a, b in zip(self, other, strict=True)))

    def mask(self, logits: Float[Array, "n vocab"]) -> Float[Array, "n vocab"]:
        """Return `logits` with -inf after each row's last kept id."""
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logit, last_id = self.logit[:, None], self.id[:, None]
        is_behind = (logits < logit) | ((logits == logit) & (ids > last_id))  # no NaN is
        return jnp.where(is_behind, -jnp.inf, logits)


def best_noisy(
    scores: Float[Array, "n vocab"],
    keys: RowKeys,
    is_noisy: Bool[Array, " n"],
    last: LastKept,
    wanted: Bool[Array, " n"],
) -> Int[Array, " n"]:
    """Return the column (int32) of the largest score plus noise, the lowest of equals.

    Rows that are not `wanted` get 0, and the kernel does not read them. So does a row without a
    finite score; a row with a NaN gets any column.

    Args:
        scores: float32.
        keys: of each row's noise.
        is_noisy: rows whose scores get Gumbel noise added.
        last: the last kept id of each row; no id after it is chosen.
        wanted: rows to compute.
    """
    if dispatch.runs_kernel("best_noisy", why_not_kernel(scores), rows=len(scores)):
        from jaxspec.pallas.selection.best_noisy_kernel import best_noisy_kernel

        return best_noisy_kernel(scores, keys, is_noisy, last, wanted)
    return best_noisy_reference(scores, keys, is_noisy, last, wanted)


def why_not_kernel(scores):
    """Return why `best_noisy_kernel` does not take these scores, or None."""
    vocab = scores.shape[1]
    if scores.dtype != jnp.float32 or vocab < TILE or vocab % 4:
        return f"{vocab:,} ids in {scores.dtype}"
    return None


def best_noisy_reference(scores, keys, is_noisy, last, wanted):
    """The specification of `best_noisy`."""
    ids = jnp.arange(scores.shape[1], dtype=jnp.uint32)[None, :]
    noise = gumbel(random_bits(RowKeys(*(key[:, None] for key in keys)), ids))
    noisy = last.mask(scores) + jnp.where(is_noisy[:, None], noise, 0.0)
    return jnp.where(wanted, jnp.argmax(noisy, axis=1).astype(jnp.int32), 0)
