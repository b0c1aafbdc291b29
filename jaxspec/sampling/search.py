"""Where top-k and top-p end in a large vocabulary, without an order of the logits.

The order of float32 numbers is that of integer keys of 32 bits. A search finds the key of the last
kept logit from its highest bits on. A pass over the logits sums what lies above `2**BITS - 1` keys
at once, and so gives the next `BITS` bits. Every search makes the same number of passes, because
the host would have to wait for a loop that ends by what the device computed. A row that needs no
search is not read by the kernel of `sums_above`.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.device import default_device
from jaxspec.pallas.selection import sums_above
from jaxspec.pallas.selection.parts import PART

BITS = 4  # of a pass: more would take longer than reading the logits does

_MAGNITUDE = 0x7FFF_FFFF  # the bits of a float32 but its sign
# Subnormal numbers have the key of 0: a CPU compares them as if they were 0.
_BELOW_NORMAL = 0x007F_FFFF
_INFINITY = 0x7F80_0000 - _BELOW_NORMAL  # its key
_LEAST_MASS = 1e-30  # the likeliest logit has mass 1, and stays whatever top-p is


class Bound(NamedTuple):
    """What a row keeps: all logits above one, and the first of those that equal it."""

    logit: Float[Array, " n"]
    number: Int[Array, " n"]  # int32; of the equal ones, by ascending ids

    @staticmethod
    def none(logits: Float[Array, "n vocab"]) -> "Bound":
        """Everything is kept."""
        n, vocab = logits.shape
        return Bound(jnp.full(n, -jnp.inf), jnp.full(n, vocab, jnp.int32))

    def where(self, chosen: Bool[Array, " n"], other: "Bound") -> "Bound":
        """This one in the rows that are `chosen`, and `other` elsewhere."""
        return Bound(*(jnp.where(chosen, a, b) for a, b in zip(self, other, strict=True)))


def bound_of_top_k(
    logits: Float[Array, "n vocab"],
    top_k: Int[Array, " n"],
    wanted: Bool[Array, " n"],
    floor: Float[Array, " n"] | float = -math.inf,
) -> Bound:
    """The bound of the `top_k` largest logits; none in rows that are not `wanted`.

    Here and below, logits under the `floor` count as if they were -inf.
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
    """The bound of the likeliest whose mass reaches `target`; `within` in rows not `wanted`.

    It keeps nothing that `within` does not keep, and always the likeliest. Masses are as in
    `sums_above`: `largest` is the row's largest logit.
    """
    target = jnp.maximum(target, _LEAST_MASS)
    logit, above = _search(logits, largest, target, jnp.zeros_like(wanted), wanted, floor)
    number = jnp.ceil((target - above) / mass(logit, largest)).astype(jnp.int32)
    most = jnp.where(logit == within.logit, within.number, logits.shape[1])
    found = Bound(logit, jnp.clip(number, 1, most))
    # Rounding may let the search end behind `within`.
    return found.where(wanted & (logit >= within.logit), within)


def mass_within(
    logits: Float[Array, "n vocab"],
    largest: Float[Array, " n"],
    bound: Bound,
    wanted: Bool[Array, " n"],
    floor: Float[Array, " n"] | float = -math.inf,
) -> Float[Array, " n"]:
    """The mass (float32) that a bound keeps; arguments as in `bound_of_mass`."""
    is_open = jnp.isneginf(bound.logit)  # whatever equals it has no mass
    limits = jnp.maximum(jnp.where(is_open, -jnp.inf, _next_above(bound.logit)), floor)
    sums = sums_above(logits, largest, limits[:, None], jnp.zeros_like(wanted), wanted).sum(
        axis=(1, 2)
    )
    return sums + bound.number.astype(jnp.float32) * mass(bound.logit, largest)


def mass(logits: Float[Array, "*shape"], largest: Float[Array, "*#shape"]) -> Array:
    """`exp(logits - largest)` (float32), which is 1 for an infinite logit that is the largest."""
    return jnp.where(logits == largest, 1.0, jnp.exp(logits - largest))


def last_id(
    logits: Float[Array, "n vocab"], bound: Bound, wanted: Bool[Array, " n"]
) -> Int[Array, " n"]:
    """The id (int32) of the last logit that equals the bound's and is kept.

    It is any id in rows that are not `wanted`.
    """
    limits = jnp.stack([bound.logit, _next_above(bound.logit)], axis=1)
    sums = sums_above(logits, bound.logit, limits, jnp.ones_like(wanted), wanted)
    equal = (sums[:, :, 0] - sums[:, :, 1]).astype(jnp.int32)  # in each part
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
    """The largest logit, so that all that are at least as large sum to `target`, or more.

    The second value is the sum of those that are larger. Sums are as in `sums_above`. Where all
    logits sum to less, it is -inf. Rows that are not `wanted` get anything.
    """
    steps = jnp.arange(1, 2**BITS, dtype=jnp.int32)[None, :]
    floors = jnp.broadcast_to(floor, len(logits))[:, None]

    def add_bits(found, shift):
        key, above = found
        limits = jnp.maximum(_from_keys(key[:, None] + (steps << shift)), floors)
        sums = sums_above(logits, largest, limits, counts, wanted).sum(axis=1)
        digit = jnp.sum(sums >= target[:, None], axis=1, dtype=jnp.int32)
        # The first limit that is too high. If none is, it is still the one of the passes before.
        sums = jnp.concatenate([sums, above[:, None]], axis=1)
        above = jnp.take_along_axis(sums, digit[:, None], axis=1)[:, 0]
        return (key + (digit << shift), above), None

    lowest = jnp.full(len(logits), jnp.iinfo(jnp.int32).min, jnp.int32)
    shifts = jnp.arange(32 - BITS, -1, -BITS, dtype=jnp.int32)
    # A GPU launches what stands in a loop more slowly; a CPU takes long to compile it many times.
    unroll = default_device().platform == "gpu"
    nothing_above = jnp.zeros(len(logits), jnp.float32)
    (key, above), _ = lax.scan(add_bits, (lowest, nothing_above), shifts, unroll=unroll)
    return _from_keys(key), above


def _next_above(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The next larger number of each; NaN behind infinity."""
    return _from_keys(_to_keys(x) + 1)


def _to_keys(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers (int32) in the order of the numbers: how many steps each is away from 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    steps = jnp.maximum((bits & _MAGNITUDE) - _BELOW_NORMAL, 0)
    return jnp.where(bits < 0, -steps, steps)


def _from_keys(keys: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The numbers (float32); NaN behind infinity, and -inf for what lies before it."""
    keys = jnp.clip(keys, -_INFINITY, _INFINITY + 1)
    magnitude = jnp.where(keys == 0, 0, jnp.abs(keys) + _BELOW_NORMAL)
    numbers = lax.bitcast_convert_type(magnitude, jnp.float32)
    return jnp.where(keys < 0, -numbers, numbers)
