"""The draw: one token from each row of logits, by noise that only its request decides."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN, argmax_or_none, has_argmax
from jaxspec.pallas.selection import LastKept, best_noisy
from jaxspec.sampler import SAMPLED, Sampler
from jaxspec.sampling.candidates import MAX_SORTED
from jaxspec.sampling.kept_draw import CUTS, draw_kept
from jaxspec.sampling.noise import Use, gumbel_noise, row_keys
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.processors import (
    PROCESSORS,
    adjusted_logits,
    cuts,
    process_logits,
)


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
    rows, vocab = logits.shape
    if not rows:  # a step without chunks has no row at their ends
        return jnp.zeros(0, jnp.int32)
    scores = adjusted_logits(logits, inputs, positions, sampler=sampler)
    is_sound, names = has_argmax(scores), cuts(sampler)
    if sampler.draws and names and set(names) <= CUTS and vocab > MAX_SORTED:
        keys = row_keys(inputs.seed, positions, use)
        tokens = draw_kept(scores, inputs, keys, frozenset(names))
        return jnp.where(is_sound, tokens, NO_TOKEN)
    for name in names:
        scores = PROCESSORS[name](scores, inputs, positions)
    if not sampler.draws:
        return argmax_or_none(scores, is_sound)
    return jnp.where(is_sound, _best_noisy(scores, inputs, positions, use), NO_TOKEN)


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
    tokens = _best_noisy(scores, inputs, positions, Use.DRAFT.at_place(place))
    return jnp.where(has_argmax(scores), tokens, NO_TOKEN)


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


def _best_noisy(
    scores: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    use: Use | Int[Array, " n"],
) -> Int[Array, " n"]:
    keys, rows = row_keys(inputs.seed, positions, use), len(scores)
    last, wanted = LastKept.none(rows), jnp.ones(rows, bool)
    return best_noisy(scores, keys, ~inputs.is_greedy, last, wanted)
