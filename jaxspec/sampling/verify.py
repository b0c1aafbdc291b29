"""Verification: which drafts stand, and the one token that follows them."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.matmul.scores import argmax_or_none
from jaxspec.sampler import Sampler
from jaxspec.sampling.draw import Use, add_noise, draft_distribution, uniform_noise
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.processors import has_choice, process_logits


@flax.struct.dataclass
class Acceptance:
    """What one step decided for each row. The axis `emits` is `drafts + 1` long."""

    tokens: Int[Array, "rows emits"]  # int32; accepted drafts, the token after them, then -1
    num_accepted: Int[Array, " rows"]  # int32; drafts that stand, 0..drafts

    @property
    def num_emitted(self) -> Int[Array, " rows"]:
        """Tokens that are real (int32): `num_accepted + 1`, less one if the target failed there."""
        return jnp.sum(self.tokens != NO_TOKEN, axis=1, dtype=jnp.int32)


def verify_exact(
    target_tokens: Int[Array, "rows emits"], draft_tokens: Int[Array, "rows drafts"]
) -> Acceptance:
    """A draft stands iff it is the token the target draws there, and all before it stand.

    `target_tokens` (int32) is the target's own token at each place, with drafts as context;
    `draft_tokens` (int32) may hold placeholders (-1), which never stand. What is emitted is
    what plain sampling would draw, token for token. For a draft that was not itself drawn at
    random this is the rejection sampling of Leviathan et al. 2023 with a one-hot `q`: the
    draft `x` stands with probability `p(x)`, else the token has the distribution `p` without `x`.

    Where the target has no token (-1, a NaN row), nothing is emitted from there on.
    """
    is_equal = draft_tokens == target_tokens[:, : draft_tokens.shape[1]]
    num_accepted = _count_leading(is_equal & (draft_tokens != NO_TOKEN))
    return _emit(draft_tokens, _at_index(target_tokens, num_accepted), num_accepted)


def verify_rejection(
    logits: Float[Array, "rows emits vocab"],
    draft_tokens: Int[Array, "rows drafts"],
    draft_logits: Float[Array, "rows drafts vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, "rows emits"],
    *,
    sampler: Sampler,
) -> Acceptance:
    """Rejection sampling (Leviathan et al. 2023, Algorithm 1) for drafts drawn by `draw_draft`.

    A draft `x` stands with probability `min(1, p(x) / q(x))`; in place of the first that falls
    a token is drawn from the excess `max(0, p - q)`. So the output has the distribution of the
    target, `p = softmax(process_logits(logits))`, whatever `q`, that of `draft_logits`.
    Greedy rows compare exactly; a program in which all rows are greedy has `verify_exact`. `inputs`
    has an entry a row; `positions` (int32) is the index in its request of each token, and the
    drafts were drawn at the same ones.

    A placeholder (-1) falls, and the token there is drawn from `p` alone. Where the target's
    row holds a NaN or nothing finite, nothing is emitted from there on.
    """
    rows, emits, vocab = logits.shape
    drafts = emits - 1
    flat = logits.reshape(-1, vocab), inputs.repeat(emits), positions.reshape(-1)
    target = process_logits(*flat, sampler=sampler).reshape(rows, emits, vocab)
    is_sound = has_choice(*flat).reshape(rows, emits)
    draft_inputs, draft_positions = inputs.repeat(drafts), positions[:, :drafts].reshape(-1)
    draft = draft_distribution(draft_logits.reshape(-1, vocab), draft_inputs, draft_positions)
    draft = draft.reshape(rows, drafts, vocab)

    u = uniform_noise(draft_inputs.seed, draft_positions, Use.ACCEPT).reshape(rows, drafts)
    p = _probability(target[:, :drafts], draft_tokens)
    q = _probability(draft, draft_tokens)
    is_best = draft_tokens == jnp.argmax(target[:, :drafts], axis=2).astype(jnp.int32)
    # A NaN in q makes the comparison false: the draft falls, and the token comes from p.
    stands = jnp.where(inputs.is_greedy[:, None], is_best, u * q < p)
    is_real = (draft_tokens >= 0) & (draft_tokens < vocab)
    num_accepted = _count_leading(stands & is_real & is_sound[:, :drafts])

    draft_fell = _at_index(jnp.pad(is_real, ((0, 0), (0, 1))), num_accepted)
    scores = _scores_after(target, draft, num_accepted, draft_fell, inputs, positions)
    token = argmax_or_none(scores, _at_index(is_sound, num_accepted))
    return _emit(draft_tokens, token, num_accepted)


def verify_synthetic(
    target_tokens: Int[Array, "rows emits"],
    draft_tokens: Int[Array, "rows drafts"],
    rates: Float[Array, " drafts"],
    seeds: Int[Array, " rows"],
    positions: Int[Array, "rows emits"],
) -> Acceptance:
    """LOSSY: drafts stand at given rates, whatever the target says. For speed benchmarks.

    `rates[j]` (float32) is the probability that draft `j` and all before it stand; drafts that
    stand are emitted as they are, then the target's token. Placeholders (-1) fall.
    """
    rows, drafts = draft_tokens.shape
    before = jnp.pad(rates, (1, 0), constant_values=1.0)[:drafts]
    conditional = jnp.where(before > 0.0, rates / jnp.where(before > 0.0, before, 1.0), 0.0)
    u = uniform_noise(
        jnp.repeat(seeds, drafts), positions[:, :drafts].reshape(-1), Use.ACCEPT
    ).reshape(rows, drafts)
    num_accepted = _count_leading((u < conditional[None, :]) & (draft_tokens != NO_TOKEN))
    return _emit(draft_tokens, _at_index(target_tokens, num_accepted), num_accepted)


def _scores_after(
    target: Float[Array, "rows emits vocab"],
    draft: Float[Array, "rows drafts vocab"],
    num_accepted: Int[Array, " rows"],
    draft_fell: Bool[Array, " rows"],
    inputs: SamplingInputs,
    positions: Int[Array, "rows emits"],
) -> Float[Array, "rows vocab"]:
    """The noisy logits after the drafts that stand: of `p` or, where a draft fell, the excess."""
    last_draft = jnp.minimum(num_accepted, draft.shape[1] - 1)
    target_logits = _at_index(target, num_accepted)
    p = jax.nn.softmax(target_logits, axis=1)
    q = jax.nn.softmax(_at_index(draft, last_draft), axis=1)
    excess = jnp.maximum(p - q, 0.0)
    # No excess (p equals q, up to rounding) or a NaN in q: then p is all that is left to draw from.
    from_excess = draft_fell & ~inputs.is_greedy & (excess.sum(axis=1) > 0.0)
    scores = jnp.where(from_excess[:, None], jnp.log(excess), target_logits)
    # From p itself the token is plain sampling's own, noise included.
    use = jnp.where(from_excess, int(Use.RESIDUAL), int(Use.TARGET))
    return add_noise(scores, inputs, _at_index(positions, num_accepted), use)


def _probability(
    logits: Float[Array, "rows places vocab"], tokens: Int[Array, "rows places"]
) -> Float[Array, "rows places"]:
    """`softmax(logits)` at `tokens`; ids outside the vocabulary read some other id's."""
    ids = jnp.clip(tokens, 0, logits.shape[2] - 1)[:, :, None]
    chosen = jnp.take_along_axis(logits, ids, axis=2)[:, :, 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=2))


def _count_leading(stands: Bool[Array, "rows drafts"]) -> Int[Array, " rows"]:
    return jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _at_index(values: Array, index: Int[Array, " rows"]) -> Array:
    """`values[r, index[r]]` of each row `r`."""
    column = index.reshape(-1, *(1 for _ in values.shape[1:]))
    return jnp.take_along_axis(values, column, axis=1)[:, 0]


def _emit(
    draft_tokens: Int[Array, "rows drafts"],
    token: Int[Array, " rows"],
    num_accepted: Int[Array, " rows"],
) -> Acceptance:
    """The drafts that stand, then `token`, then -1."""
    # The value behind the last draft does not matter: only `token` can be emitted there.
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    offset = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :]
    end = num_accepted[:, None]
    rest = jnp.where(offset == end, token[:, None], NO_TOKEN)
    return Acceptance(tokens=jnp.where(offset < end, drafts, rest), num_accepted=num_accepted)
