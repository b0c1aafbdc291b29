"""Rejection sampling of drafts that were drawn at random: per draft, or per block of drafts."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.matmul.scores import argmax_or_none
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.sampling.draw import add_noise, draft_distribution
from jaxspec.sampling.noise import Use, uniform_noise
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.processors import has_choice, process_logits
from jaxspec.sampling.verify import Acceptance, at_index, count_leading, emit


def verify_rejection(
    logits: Float[Array, "rows emits vocab"],
    draft_tokens: Int[Array, "rows drafts"],
    draft_logits: Float[Array, "rows drafts vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, "rows emits"],
    *,
    features: SamplingFeatures,
) -> Acceptance:
    """Verify drafts of `draw_draft` by rejection sampling (Leviathan et al. 2023, Algorithm 1).

    A draft `x` is accepted with probability `min(1, p(x) / q(x))`; the first rejected draft is
    replaced by a token drawn from the excess `max(0, p - q)`. The output then has the distribution
    of the target, `p = softmax(process_logits(logits))`, for any `q`, the distribution of
    `draft_logits`. Greedy rows compare exactly; a program with only greedy rows uses
    `verify_exact`. `inputs` has one entry per row; `positions` (int32) is the index in its request
    of each token, and the drafts were drawn at the same positions.

    A placeholder (-1) is rejected, and so is a draft whose `draft_logits` hold a NaN or nothing
    finite; the token there is drawn from `p` alone. If the target's logits hold a NaN or nothing
    finite at a position, nothing is emitted from there on.
    """
    drawn = _Drawn.of(logits, draft_tokens, draft_logits, inputs, positions, features)
    num_drafts = drawn.num_drafts
    u = drawn.uniforms()
    stands = jnp.where(inputs.is_greedy[:, None], drawn.is_best, u * drawn.q < drawn.p)
    num_accepted = count_leading(stands & drawn.is_before(num_drafts))
    scale = jnp.ones(num_accepted.shape, jnp.float32)
    return drawn.emit(num_accepted, num_drafts, scale)


def verify_block(
    logits: Float[Array, "rows emits vocab"],
    draft_tokens: Int[Array, "rows drafts"],
    draft_logits: Float[Array, "rows drafts vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, "rows emits"],
    *,
    features: SamplingFeatures,
) -> Acceptance:
    """Verify drafts of `draw_draft` together (block verification: Sun et al. 2024, Algorithm 2).

    Each draft of a row has a test (`judge_block`), and all drafts up to the last one whose test
    passes are accepted (arXiv 2403.10444). The output has the same distribution as that of
    `verify_rejection`, and the expected number of accepted drafts is at least as large. Arguments,
    greedy rows, placeholders and NaN are as in `verify_rejection`. A row's block ends before its
    first placeholder.

    The number of accepted drafts depends on all drafts of the block, and the positions after a
    rejection are drafted again in the row's next step. For this reason `draw_draft` and the tests
    use different noise at each place of a step.
    """
    drawn = _Drawn.of(logits, draft_tokens, draft_logits, inputs, positions, features)
    num_drafts = drawn.num_drafts
    block = judge_block(drawn.p, drawn.q, drawn.target_probs, drawn.draft_probs, num_drafts)
    place = jnp.arange(draft_tokens.shape[1], dtype=jnp.int32)
    passes = drawn.uniforms(place) < block.passes
    num_passed = jnp.max(jnp.where(passes, place + 1, 0), axis=1, initial=0)
    num_best = count_leading(drawn.is_best & drawn.is_before(num_drafts))
    num_accepted = jnp.where(inputs.is_greedy, num_best, num_passed)
    return drawn.emit(num_accepted, num_drafts, at_index(block.scales, num_accepted))


class Block(NamedTuple):
    """Probabilities `p_0` to `p_K` and `h_1` to `h_K` of the block verification paper."""

    scales: Float[Array, "rows emits"]  # probability that at least `i` drafts are accepted
    passes: Float[Array, "rows drafts"]  # probability that the test of a draft passes


def judge_block(
    p: Float[Array, "rows drafts"],
    q: Float[Array, "rows drafts"],
    target_probs: Float[Array, "rows drafts vocab"],
    draft_probs: Float[Array, "rows drafts vocab"],
    num_drafts: Int[Array, " rows"],
) -> Block:
    """Return the probability (float32) that each test of a block of `num_drafts` drafts passes.

    `p` and `q` are the probabilities of the drafts, `target_probs` and `draft_probs` those of all
    ids at the same positions. Entries after the last draft are not read.

    `p_i = min(p_{i-1} * p(x_i) / q(x_i), 1)`, and with the excess `S_i = sum(max(p_i * p - q, 0))`
    at the position after draft `i`, `h_i = S_i / (S_i + 1 - p_i)`. No excess follows the last
    draft, and `h_K = p_K`.
    """
    drafts = p.shape[1]
    scale = jnp.ones(p.shape[:1], jnp.float32)
    scales = [scale]
    for i in range(drafts):
        # 0 where the division gives NaN: `p` and `q` of the draft are both 0.
        ratio = scale * p[:, i] / q[:, i]
        scale = jnp.where(ratio > 0.0, jnp.minimum(ratio, 1.0), 0.0)
        scales.append(scale)
    scales = jnp.stack(scales, axis=1)
    excess = excess_of(target_probs, draft_probs, scales[:, :drafts, None]).sum(axis=2)
    behind = jnp.pad(excess[:, 1:], ((0, 0), (0, 1)))[:, :drafts]
    rest = behind + 1.0 - scales[:, 1:]
    # `rest` is 0 if `p_i` is 1 and `p` equals `q` after draft `i`: its test always passes.
    h = jnp.where(rest > 0.0, behind / jnp.where(rest > 0.0, rest, 1.0), 1.0)
    number = jnp.arange(1, drafts + 1, dtype=jnp.int32)[None, :]
    last = num_drafts[:, None]
    passes = jnp.where(number < last, h, jnp.where(number == last, scales[:, 1:], 0.0))
    return Block(scales=scales, passes=passes)


def excess_of(
    p: Float[Array, "*places vocab"],
    q: Float[Array, "*places vocab"],
    scale: Float[Array, "*places 1"],
) -> Float[Array, "*places vocab"]:
    """Return `max(scale * p - q, 0)` (float32), from which the replacement of a draft is drawn."""
    return jnp.maximum(scale * p - q, 0.0)


@flax.struct.dataclass
class _Drawn:
    """Drafts, and the two distributions that decide on them, by row and position."""

    tokens: Int[Array, "rows drafts"]
    target: Float[Array, "rows emits vocab"]  # logits of p
    draft: Float[Array, "rows drafts vocab"]  # logits of q
    is_sound: Bool[Array, "rows emits"]  # positions where the target has a token
    inputs: SamplingInputs
    positions: Int[Array, "rows emits"]

    @staticmethod
    def of(logits, tokens, draft_logits, inputs, positions, features) -> "_Drawn":
        rows, emits, vocab = logits.shape
        drafts = emits - 1
        flat_logits = logits.reshape(rows * emits, vocab)
        flat = flat_logits, inputs.repeat(emits), positions.reshape(-1)
        target = process_logits(*flat, features=features).reshape(rows, emits, vocab)
        draft_positions = positions[:, :drafts].reshape(-1)
        draft = draft_distribution(
            draft_logits.reshape(rows * drafts, vocab), inputs.repeat(drafts), draft_positions
        )
        return _Drawn(
            tokens=tokens,
            target=target,
            draft=draft.reshape(rows, drafts, vocab),
            is_sound=has_choice(*flat, features=features).reshape(rows, emits),
            inputs=inputs,
            positions=positions,
        )

    @property
    def judged(self) -> Float[Array, "rows drafts vocab"]:
        """Target's logits at the positions of the drafts."""
        return self.target[:, : self.tokens.shape[1]]

    @property
    def p(self) -> Float[Array, "rows drafts"]:
        return _probability(self.judged, self.tokens)

    @property
    def q(self) -> Float[Array, "rows drafts"]:
        return _probability(self.draft, self.tokens)

    @property
    def target_probs(self) -> Float[Array, "rows drafts vocab"]:
        return jax.nn.softmax(self.judged, axis=2)

    @property
    def draft_probs(self) -> Float[Array, "rows drafts vocab"]:
        return jax.nn.softmax(self.draft, axis=2)

    @property
    def is_best(self) -> Bool[Array, "rows drafts"]:
        """Drafts that a greedy row accepts."""
        return self.tokens == jnp.argmax(self.judged, axis=2).astype(jnp.int32)

    @property
    def num_drafts(self) -> Int[Array, " rows"]:
        """Number of drafts (int32) before the first one that cannot be verified.

        That is a placeholder, an id out of range, or a position at which `p` or `q` is no
        distribution.
        """
        is_real = (self.tokens >= 0) & (self.tokens < self.draft.shape[2])
        has_p = self.is_sound[:, : self.tokens.shape[1]]
        has_p &= self.inputs.is_greedy[:, None] | _is_distribution(self.judged)
        # Greedy rows compare drafts with the target's token and do not read `q`.
        has_q = self.inputs.is_greedy[:, None] | _is_distribution(self.draft)
        return count_leading(is_real & has_p & has_q)

    def is_before(self, end: Int[Array, " rows"]) -> Bool[Array, "rows drafts"]:
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :] < end[:, None]

    def uniforms(self, place: Int[Array, " drafts"] | int = 0) -> Float[Array, "rows drafts"]:
        """Return the random number of each draft's test; `place` is as in `draw_draft`."""
        rows, drafts = self.tokens.shape
        positions = self.positions[:, :drafts].reshape(-1)
        use = jnp.broadcast_to(Use.ACCEPT.at_place(place), (rows, drafts)).reshape(-1)
        seeds = self.inputs.repeat(drafts).seed
        return uniform_noise(seeds, positions, use).reshape(rows, drafts)

    def emit(
        self,
        num_accepted: Int[Array, " rows"],
        num_drafts: Int[Array, " rows"],
        scale: Float[Array, " rows"],
    ) -> Acceptance:
        """Return the accepted drafts and the token after them.

        After a rejected draft, that token has the distribution `max(scale * p - q, 0)`, else `p`.
        """
        last_draft = jnp.minimum(num_accepted, self.tokens.shape[1] - 1)
        target_logits = at_index(self.target, num_accepted)
        p = jax.nn.softmax(target_logits, axis=1)
        q = jax.nn.softmax(at_index(self.draft, last_draft), axis=1)
        excess = excess_of(p, q, scale[:, None])
        draft_fell = (num_accepted < num_drafts) & ~self.inputs.is_greedy
        # Without excess (p equals q, up to rounding), the token is drawn from p.
        from_excess = draft_fell & (excess.sum(axis=1) > 0.0)
        scores = jnp.where(from_excess[:, None], jnp.log(excess), target_logits)
        # Drawn from p, the token is that of plain sampling, including the noise.
        use = jnp.where(from_excess, int(Use.RESIDUAL), int(Use.TARGET))
        scores = add_noise(scores, self.inputs, at_index(self.positions, num_accepted), use)
        token = argmax_or_none(scores, at_index(self.is_sound, num_accepted))
        return emit(self.tokens, token, num_accepted)


def _probability(
    logits: Float[Array, "rows places vocab"], tokens: Int[Array, "rows places"]
) -> Float[Array, "rows places"]:
    """Return `softmax(logits)` at `tokens`; for ids out of range, that of some other id."""
    ids = jnp.clip(tokens, 0, logits.shape[2] - 1)[:, :, None]
    chosen = jnp.take_along_axis(logits, ids, axis=2)[:, :, 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=2))


def _is_distribution(logits: Float[Array, "rows places vocab"]) -> Bool[Array, "rows places"]:
    return jnp.isfinite(jax.nn.logsumexp(logits, axis=2))
