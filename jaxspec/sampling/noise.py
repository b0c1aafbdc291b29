"""Random numbers that are functions of (seed, position, use) alone."""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.pallas.selection.noise import RowKeys, gumbel, open_uniform, random_bits


class Use(enum.IntEnum):
    """Purpose of a random number; numbers of two uses are independent.

    If the acceptance test of a draft shared the noise that drew it, the output would be biased.
    """

    TARGET = 0  # token drawn from the target's distribution
    DRAFT = 1  # draft drawn by a proposer
    ACCEPT = 2  # acceptance test of a draft
    RESIDUAL = 3  # token that replaces a rejected draft
    CORRUPT = 4  # choice of the oracle proposer's wrong drafts

    def at_place(self, place: int | Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the use (int32) at a place of a step, from 0 on; at place 0, the use itself.

        If two steps of a request draw at the same position, they do so at different places, so
        their numbers are independent.
        """
        return jnp.asarray(self + len(Use) * place, jnp.int32)


def row_keys(
    seeds: Int[Array, " n"], positions: Int[Array, " n"], use: Use | Int[Array, " n"]
) -> RowKeys:
    """Return the key of each row's noise, made by threefry."""
    bits = _threefry(seeds, positions, use, (2,))
    return RowKeys(bits[:, 0], bits[:, 1])


def gumbel_noise(
    seeds: Int[Array, " n"],
    positions: Int[Array, " n"],
    use: Use | Int[Array, " n"],
    ids: int | Int[Array, "n count"],
) -> Float[Array, "n count"]:
    """Return standard Gumbel noise (float32, finite), a function of (seed, position, use, id).

    Args:
        seeds: int32.
        positions: int32.
        use: one for all rows, or int32 per row.
        ids: ids of each row (int32), or the vocabulary size for all ids in order.
    """
    if isinstance(ids, int):
        ids = jnp.arange(ids, dtype=jnp.int32)[None, :]
    keys = RowKeys(*(key[:, None] for key in row_keys(seeds, positions, use)))
    return gumbel(random_bits(keys, ids.astype(jnp.uint32)))


def uniform_noise(
    seeds: Int[Array, " n"], positions: Int[Array, " n"], use: Use | Int[Array, " n"]
) -> Float[Array, " n"]:
    """Return a uniform number (float32) in the open interval (0, 1) for each row."""
    return open_uniform(_threefry(seeds, positions, use, ()))


def _threefry(
    seeds: Int[Array, " n"],
    positions: Int[Array, " n"],
    use: Use | Int[Array, " n"],
    shape: tuple[int, ...],
) -> UInt32[Array, "n ..."]:
    def of_row(seed, position, use):
        # An explicit implementation: JAX's configurable default must not change the output.
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), use)
        return jax.random.bits(key, shape, jnp.uint32)

    uses = jnp.broadcast_to(jnp.asarray(use, jnp.int32), seeds.shape)
    return jax.vmap(of_row)(seeds, positions, uses)
