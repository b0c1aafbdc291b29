"""The draw: one token from each row of logits, by noise that only its request decides."""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.pallas.matmul.scores import argmax_or_none
from jaxspec.sampler import SAMPLED, Sampler
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.processors import has_choice, process_logits


class Use(enum.IntEnum):
    """What a random number is for: numbers of two uses are independent.

    Were the test of a draft to share the noise that drew it, the output would be biased.
    """

    TARGET = 0  # a token drawn from the target's distribution
    DRAFT = 1  # a token drawn by a proposer
    ACCEPT = 2  # whether a draft stands
    RESIDUAL = 3  # the token in place of a draft that fell
    CORRUPT = 4  # which drafts of the oracle proposer are wrong

    def at_place(self, place: int | Int[Array, "..."]) -> Int[Array, "..."]:
        """The use (int32) at a place of a step, from 0 on; at place 0 it is the use itself.

        A token's position and its place tell of the step. Two steps of a request that draw at one
        position draw it at two places, and their numbers are independent.
        """
        return jnp.asarray(self + len(Use) * place, jnp.int32)


def draw(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    sampler: Sampler,
    use: Use = Use.TARGET,
) -> Int[Array, " n"]:
    """A token (int32) from each row, by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014).

    `argmax(process_logits(logits) + noise)` has the distribution `softmax(process_logits(logits))`;
    greedy rows add no noise. The noise is a function of (seed, position, use) alone, so a token
    depends on neither the row it is drawn in, nor the batch, nor which step draws it.
    `positions` (int32) is the index in its request of the token to draw.

    A row for which `has_choice` is false (a NaN, nothing finite) gives `NO_TOKEN` (-1).
    """
    scores = process_logits(logits, inputs, positions, sampler=sampler)
    # Where no row draws, penalties and masks alone made logits: noise would cost as much as those.
    noisy = add_noise(scores, inputs, positions, use) if sampler.draws else scores
    return argmax_or_none(noisy, has_choice(logits, inputs, positions, sampler=sampler))


def draw_draft(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    place: int | Int[Array, " n"] = 0,
) -> Int[Array, " n"]:
    """A draft (int32) from each row of a proposer's logits, for rejection sampling to judge.

    It is drawn from `draft_distribution`, with noise of its own. `place` is the draft's number in
    its step, from 0 on: a position is drafted again after a draft before it fell, and block
    verification then already knows something of the first draw there. Arguments as in `draw`.
    """
    scores = draft_distribution(logits, inputs, positions)
    noisy = add_noise(scores, inputs, positions, Use.DRAFT.at_place(place))
    return argmax_or_none(noisy, has_choice(logits, inputs, positions, sampler=SAMPLED))


def draft_distribution(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Logits (float32) of `q`: the same to the proposer that draws and to the test of its draft.

    Without top-k and top-p, whatever the batch needs: they would cost a search for each draft.
    """
    return process_logits(logits, inputs, positions, sampler=SAMPLED)


def add_noise(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    use: Use | Int[Array, " n"],
) -> Float[Array, "n vocab"]:
    """`logits` (float32) plus Gumbel noise, except in greedy rows."""
    noise = gumbel_noise(inputs.seed, positions, use, logits.shape[1])
    return logits + jnp.where(inputs.is_greedy[:, None], 0.0, noise)


def gumbel_noise(
    seeds: Int[Array, " n"],
    positions: Int[Array, " n"],
    use: Use | Int[Array, " n"],
    vocab: int,
) -> Float[Array, "n vocab"]:
    """Standard Gumbel noise (float32, finite), a function of (seed, position, use, id) alone."""
    bits = _random_bits(seeds, positions, use, (vocab,))
    # The largest values decide the draw. The smallest uniforms give them, which are finely spaced:
    # log1p keeps them apart, and log of a number near 1 would make them equal.
    return -jnp.log(-jnp.log1p(-_open_uniform(bits)))


def uniform_noise(
    seeds: Int[Array, " n"], positions: Int[Array, " n"], use: Use | Int[Array, " n"]
) -> Float[Array, " n"]:
    """A uniform number (float32) in the open interval (0, 1) for each (seed, position, use)."""
    return _open_uniform(_random_bits(seeds, positions, use, ()))


def _random_bits(
    seeds: Int[Array, " n"],
    positions: Int[Array, " n"],
    use: Use | Int[Array, " n"],
    shape: tuple[int, ...],
) -> UInt32[Array, "n ..."]:
    def of_row(seed, position, use):
        # The generator is named, so that a user's default one cannot change the output.
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), use)
        return jax.random.bits(key, shape, jnp.uint32)

    uses = jnp.broadcast_to(jnp.asarray(use, jnp.int32), seeds.shape)
    return jax.vmap(of_row)(seeds, positions, uses)


def _open_uniform(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    # 32 bits, not the 23 of jax.random.uniform: a vocabulary has 2**18 ids, and a 0 would
    # accept a draft of probability 0. The largest values round to 1, hence the bound.
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
