"""Search for the last logit that top-k or top-p keeps in a large vocabulary, without sorting.

float32 numbers are ordered like 32-bit integer keys. A search determines the key of the last kept
logit from its highest bits on. One pass over the logits sums those above each of `2**BITS - 1`
keys, which gives the next `BITS` bits. Every search makes the same number of passes: the host would
have to wait for a loop whose end depends on device data. The kernel of `sums_above` does not read
rows that need no search.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.device import default_device
from jaxspec.pallas.selection import sums_above
from jaxspec.pallas.selection.parts import PART

BITS = 4  # bits per pass; with more, the sums would take longer than reading the logits

_MAGNITUDE = 0x7FFF_FFFF  # all bits of a float32 except its sign
# Subnormal numbers have the key of 0, since a CPU compares them as 0.
_BELOW_NORMAL = 0x007F_FFFF
_INFINITY = 0x7F80_0000 - _BELOW_NORMAL  # key of infinity
_LEAST_MASS = 1e-30  # the likeliest logit has mass 1, so any top-p keeps it


class Bound(NamedTuple):
    """Bound of the kept logits: all above `logit`, and the first `number` of those equal to it."""

    logit: Float[Array, " n"]
    number: Int[Array, " n"]  # int32; equal logits are kept in ascending order of ids

    @staticmethod
    def none(logits: Float[Array, "n vocab"]) -> "Bound":
        """Return the bound that keeps everything."""
        n, vocab = logits.shape
        return Bound(jnp.full(n, -jnp.inf), jnp.full(n, vocab, jnp.int32))

    def where(self, chosen: Bool[Array, " n"], other: "Bound") -> "Bound":
        """Return this bound in the rows that are `chosen`, and `other` elsewhere."""
        return Bound(*(jnp.where(chosen, a, b) for a, b in zip(self, other, strict=True)))


def bound_of_top_k(
    logits: Float[Array, "n vocab"],
    top_k: Int[Array, " n"],
    wanted: Bool[Array, " n"],
    floor: Float[Array, " n"] | float = -math.inf,
) -> Bound:
    """Return the bound of the `top_k` largest logits; `Bound.none` in rows that are not `wanted`.

    Here and in the functions below, logits under the `floor` count as -inf.
    """
    target, unread = top_k.astype(jnp.float32), jnp.zeros(len(logits))
    logit, above = _search(logits, unread, target, jnp.ones_like(wanted), wanted, floor)
    number = top_k - above.astype(jnp.int32)
    return Bound(logit, number).where(wanted, Bound.none(logits))


def bound_of_mass(
    logits: Float[Array, "n vocab"],
    largest: Float[Array, " n"],
    target: Float[Array, " n"],
    within: Bound,
    wanted: Bool[Array, " n"],
    floor: Float[Array, " n"] | float = -math.inf,
) -> Bound:
    """Return the bound of the likeliest logits whose mass reaches `target`.

    It keeps nothing that `within` does not keep, and always the likeliest logit. Rows that are not
    `wanted` get `within`. Masses are as in `sums_above`: `largest` is the row's largest logit.
    """
    target = jnp.maximum(target, _LEAST_MASS)
    logit, above = _search(logits, largest, target, jnp.zeros_like(wanted), wanted, floor)
    number = jnp.ceil((target - above) / mass(logit, largest)).astype(jnp.int32)
    most = jnp.where(logit == within.logit, within.number, logits.shape[1])
    found = Bound(logit, jnp.clip(number, 1, most))
    # Due to rounding, the search may end below `within`.
    return found.where(wanted & (logit >= within.logit), within)


def mass_within(
    logits: Float[Array, "n vocab"],
    largest: Float[Array, " n"],
    bound: Bound,
    wanted: Bool[Array, " n"],
    floor: Float[Array, " n"] | float = -math.inf,
) -> Float[Array, " n"]:
    """Return the mass (float32) that a bound keeps; arguments as in `bound_of_mass`."""
    is_open = jnp.isneginf(bound.logit)  # logits of -inf have no mass
    limits = jnp.maximum(jnp.where(is_open, -jnp.inf, _next_above(bound.logit)), floor)
    sums = sums_above(logits, largest, limits[:, None], jnp.zeros_like(wanted), wanted).sum(
        axis=(1, 2)
    )
    return sums + bound.number.astype(jnp.float32) * mass(bound.logit, largest)


def mass(logits: Float[Array, "*shape"], largest: Float[Array, "*#shape"]) -> Array:
    """Return `exp(logits - largest)` (float32), and 1 where an infinite logit is the largest."""
    return jnp.where(logits == largest, 1.0, jnp.exp(logits - largest))


def last_id(
    logits: Float[Array, "n vocab"], bound: Bound, wanted: Bool[Array, " n"]
) -> Int[Array, " n"]:
    """Return the id (int32) of the last kept logit among those that equal the bound's.

    It is arbitrary in rows that are not `wanted`.
    """
    limits = jnp.stack([bound.logit, _next_above(bound.logit)], axis=1)
    sums = sums_above(logits, bound.logit, limits, jnp.ones_like(wanted), wanted)
    equal = (sums[:, :, 0] - sums[:, :, 1]).astype(jnp.int32)  # per part
    ends = jnp.cumsum(equal, axis=1)
    number = jnp.minimum(bound.number, ends[:, -1])[:, None]
    part = jnp.sum(ends < number, axis=1, dtype=jnp.int32)[:, None]
    number = number - jnp.take_along_axis(ends - equal, part, axis=1, mode="clip")
    ids = part * PART + jnp.arange(PART, dtype=jnp.int32)[None, :]
    logits_of_part = jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=jnp.nan)
    rank = jnp.cumsum(logits_of_part == bound.logit[:, None], axis=1, dtype=jnp.int32)
    return part[:, 0] * PART + jnp.sum(rank < number, axis=1, dtype=jnp.int32)


def _search(
    logits: Float[Array, "n vocab"],
    largest: Float[Array, " n"],
    target: Float[Array, " n"],
    counts: Bool[Array, " n"],
    wanted: Bool[Array, " n"],
    floor: Float[Array, " n"] | float,
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return the largest logit such that it and all larger ones sum to `target` or more.

    The second value is the sum of those that are larger. Sums are as in `sums_above`. If all logits
    sum to less, the result is -inf. Rows that are not `wanted` get arbitrary values.
    """
    steps = jnp.arange(1, 2**BITS, dtype=jnp.int32)[None, :]
    floors = jnp.broadcast_to(floor, len(logits))[:, None]

    def add_bits(found, shift):
        key, above = found
        limits = jnp.maximum(_from_keys(key[:, None] + (steps << shift)), floors)
        sums = sums_above(logits, largest, limits, counts, wanted).sum(axis=1)
        digit = jnp.sum(sums >= target[:, None], axis=1, dtype=jnp.int32)
        # Sum above the first limit that is too high; if none is, the sum of an earlier pass.
        sums = jnp.concatenate([sums, above[:, None]], axis=1)
        above = jnp.take_along_axis(sums, digit[:, None], axis=1)[:, 0]
        return (key + (digit << shift), above), None

    lowest = jnp.full(len(logits), jnp.iinfo(jnp.int32).min, jnp.int32)
    shifts = jnp.arange(32 - BITS, -1, -BITS, dtype=jnp.int32)
    # GPU: kernels inside a loop launch more slowly. CPU: unrolling takes long to compile.
    unroll = default_device().platform == "gpu"
    nothing_above = jnp.zeros(len(logits), jnp.float32)
    (key, above), _ = lax.scan(add_bits, (lowest, nothing_above), shifts, unroll=unroll)
    return _from_keys(key), above


def _next_above(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the next larger number of each; NaN after infinity."""
    return _from_keys(_to_keys(x) + 1)


def _to_keys(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return integers (int32) ordered like the numbers: float32 steps from 0, with their sign."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    steps = jnp.maximum((bits & _MAGNITUDE) - _BELOW_NORMAL, 0)
    return jnp.where(bits < 0, -steps, steps)


def _from_keys(keys: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the numbers (float32) of `keys`; NaN after infinity, -inf before -infinity."""
    keys = jnp.clip(keys, -_INFINITY, _INFINITY + 1)
    magnitude = jnp.where(keys == 0, 0, jnp.abs(keys) + _BELOW_NORMAL)
    numbers = lax.bitcast_convert_type(magnitude, jnp.float32)
    return jnp.where(keys < 0, -numbers, numbers)
