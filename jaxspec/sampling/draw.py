"""Drawing of tokens and drafts from logits, with noise that depends on the request alone."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN, argmax_or_none, has_argmax
from jaxspec.pallas.selection import LastKept, best_noisy
from jaxspec.requests.sampling_features import SAMPLED, SamplingFeatures
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
    features: SamplingFeatures,
    use: Use = Use.TARGET,
) -> Int[Array, " n"]:
    """Draw a token (int32) per row by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014).

    `argmax(process_logits(logits) + noise)` has the distribution `softmax(process_logits(logits))`;
    greedy rows add no noise. The noise is a function of (seed, position, use) alone, so a token
    does not depend on its row, on the batch, or on the step that draws it. `positions` (int32) is
    the index in its request of the token to draw.

    A row for which `has_choice` is False (a NaN, nothing finite) gets `NO_TOKEN` (-1).
    """
    rows, vocab = logits.shape
    if not rows:  # a step without prompt chunks has no row for their ends
        return jnp.zeros(0, jnp.int32)
    scores = adjusted_logits(logits, inputs, positions, features=features)
    is_sound, names = has_argmax(scores), cuts(features)
    if features.draws and names and set(names) <= CUTS and vocab > MAX_SORTED:
        keys = row_keys(inputs.seed, positions, use)
        tokens = draw_kept(scores, inputs, keys, frozenset(names))
        return jnp.where(is_sound, tokens, NO_TOKEN)
    for name in names:
        scores = PROCESSORS[name](scores, inputs, positions)
    if not features.draws:
        return argmax_or_none(scores, is_sound)
    return jnp.where(is_sound, _best_noisy(scores, inputs, positions, use), NO_TOKEN)


def draw_draft(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    place: int | Int[Array, " n"] = 0,
) -> Int[Array, " n"]:
    """Draw a draft (int32) from each row of a proposer's logits, for rejection sampling.

    Drafts are drawn from `draft_distribution`, with noise that no other draw uses. `place` is the
    index of the draft in its step: after a rejected draft, the next step drafts the positions that
    follow again. Block verification has by then used the first draws at these positions, so the new
    ones must be independent of them. Arguments as in `draw`.
    """
    scores = draft_distribution(logits, inputs, positions)
    tokens = _best_noisy(scores, inputs, positions, Use.DRAFT.at_place(place))
    return jnp.where(has_argmax(scores), tokens, NO_TOKEN)


def draft_distribution(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Return the logits (float32) of `q`, used to draw drafts and to verify them.

    Top-k and top-p are never applied: they would cost a search per draft.
    """
    return process_logits(logits, inputs, positions, features=SAMPLED)


def add_noise(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    use: Use | Int[Array, " n"],
) -> Float[Array, "n vocab"]:
    """Add Gumbel noise to `logits` (float32), except in greedy rows."""
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
