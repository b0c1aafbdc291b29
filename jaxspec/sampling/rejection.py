"""Rejection sampling: drafts that were drawn at random stand or fall by p and q."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.matmul.scores import argmax_or_none
from jaxspec.sampler import Sampler
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
    sampler: Sampler,
) -> Acceptance:
    """Rejection sampling (Leviathan et al. 2023, Algorithm 1) for drafts drawn by `draw_draft`.

    A draft `x` stands with probability `min(1, p(x) / q(x))`; in place of the first that falls
    a token is drawn from the excess `max(0, p - q)`. So the output has the distribution of the
    target, `p = softmax(process_logits(logits))`, whatever `q`, that of `draft_logits`.
    Greedy rows compare exactly; a program in which all rows are greedy has `verify_exact`. `inputs`
    has an entry a row; `positions` (int32) is the index in its request of each token, and the
    drafts were drawn at the same ones.

    A placeholder (-1) falls, and so does a draft whose `draft_logits` hold a NaN or nothing finite;
    the token there is drawn from `p` alone. Where the target's row holds a NaN or nothing finite,
    nothing is emitted from there on.
    """
    drawn = _Drawn.of(logits, draft_tokens, draft_logits, inputs, positions, sampler)
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
    sampler: Sampler,
) -> Acceptance:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, Algorithm 2).

    A row's drafts are judged together: each has a test (`judge_block`), and all up to the last one
    that passes stand. The output has the distribution that `verify_rejection` gives, and no fewer
    drafts stand in expectation. Arguments, greedy rows, placeholders and NaN are as there. A row's
    block ends before its first placeholder.

    A test that fails tells of the drafts behind it, which are drawn again in the row's next step.
    So `draw_draft` and the tests have other noise at each place of a step.
    """
    drawn = _Drawn.of(logits, draft_tokens, draft_logits, inputs, positions, sampler)
    num_drafts = drawn.num_drafts
    block = judge_block(drawn.p, drawn.q, drawn.target_probs, drawn.draft_probs, num_drafts)
    place = jnp.arange(draft_tokens.shape[1], dtype=jnp.int32)
    passes = drawn.uniforms(place) < block.passes
    num_passed = jnp.max(jnp.where(passes, place + 1, 0), axis=1, initial=0)
    num_best = count_leading(drawn.is_best & drawn.is_before(num_drafts))
    num_accepted = jnp.where(inputs.is_greedy, num_best, num_passed)
    return drawn.emit(num_accepted, num_drafts, at_index(block.scales, num_accepted))


class Block(NamedTuple):
    """The paper's `p_0` to `p_K`, and `h_1` to `h_K`."""

    scales: Float[Array, "rows emits"]  # the chance that at least so many drafts stand
    passes: Float[Array, "rows drafts"]  # the chance that the test of a draft passes


def judge_block(
    p: Float[Array, "rows drafts"],
    q: Float[Array, "rows drafts"],
    target_probs: Float[Array, "rows drafts vocab"],
    draft_probs: Float[Array, "rows drafts vocab"],
    num_drafts: Int[Array, " rows"],
) -> Block:
    """How likely each test of a block passes (float32), given its first `num_drafts` drafts.

    `p` and `q` are the probabilities of the drafts, `target_probs` and `draft_probs` those of all
    ids at the same places. What lies behind the last draft is not read.

    `p_i = min(p_{i-1} * p(x_i) / q(x_i), 1)`, and with the excess
    `S_i = sum(max(p_i * p - q, 0))` of the place behind draft `i`, `h_i = S_i / (S_i + 1 - p_i)`.
    The last draft has none, and `h_K = p_K`.
    """
    drafts = p.shape[1]
    scale = jnp.ones(p.shape[:1], jnp.float32)
    scales = [scale]
    for i in range(drafts):
        # 0 where the division gives NaN: a draft that neither could give.
        ratio = scale * p[:, i] / q[:, i]
        scale = jnp.where(ratio > 0.0, jnp.minimum(ratio, 1.0), 0.0)
        scales.append(scale)
    scales = jnp.stack(scales, axis=1)
    excess = excess_of(target_probs, draft_probs, scales[:, :drafts, None]).sum(axis=2)
    behind = jnp.pad(excess[:, 1:], ((0, 0), (0, 1)))[:, :drafts]
    rest = behind + 1.0 - scales[:, 1:]
    # No rest: `p_i` is 1 and `p` equals `q`. The drafts behind stand, and so does this one.
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
    """`max(scale * p - q, 0)` (float32): what a token in place of a draft is drawn from."""
    return jnp.maximum(scale * p - q, 0.0)


@flax.struct.dataclass
class _Drawn:
    """Drafts, and the two distributions that decide on them. Entries are one a row and place."""

    tokens: Int[Array, "rows drafts"]
    target: Float[Array, "rows emits vocab"]  # logits of p
    draft: Float[Array, "rows drafts vocab"]  # logits of q
    is_sound: Bool[Array, "rows emits"]  # places where the target has a token
    inputs: SamplingInputs
    positions: Int[Array, "rows emits"]

    @staticmethod
    def of(logits, tokens, draft_logits, inputs, positions, sampler) -> "_Drawn":
        rows, emits, vocab = logits.shape
        drafts = emits - 1
        flat_logits = logits.reshape(rows * emits, vocab)
        flat = flat_logits, inputs.repeat(emits), positions.reshape(-1)
        target = process_logits(*flat, sampler=sampler).reshape(rows, emits, vocab)
        draft_positions = positions[:, :drafts].reshape(-1)
        draft = draft_distribution(
            draft_logits.reshape(rows * drafts, vocab), inputs.repeat(drafts), draft_positions
        )
        return _Drawn(
            tokens=tokens,
            target=target,
            draft=draft.reshape(rows, drafts, vocab),
            is_sound=has_choice(*flat, sampler=sampler).reshape(rows, emits),
            inputs=inputs,
            positions=positions,
        )

    @property
    def judged(self) -> Float[Array, "rows drafts vocab"]:
        """The target's logits at the places of the drafts."""
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
        """Drafts that a greedy row takes."""
        return self.tokens == jnp.argmax(self.judged, axis=2).astype(jnp.int32)

    @property
    def num_drafts(self) -> Int[Array, " rows"]:
        """Drafts before the first that cannot be judged (int32).

        That is a placeholder, or an id out of range; or `p` or `q` is no distribution there.
        """
        is_real = (self.tokens >= 0) & (self.tokens < self.draft.shape[2])
        has_p = self.is_sound[:, : self.tokens.shape[1]]
        has_p &= self.inputs.is_greedy[:, None] | _is_distribution(self.judged)
        # A greedy row's draft is compared with the target's token alone.
        has_q = self.inputs.is_greedy[:, None] | _is_distribution(self.draft)
        return count_leading(is_real & has_p & has_q)

    def is_before(self, end: Int[Array, " rows"]) -> Bool[Array, "rows drafts"]:
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :] < end[:, None]

    def uniforms(self, place: Int[Array, " drafts"] | int = 0) -> Float[Array, "rows drafts"]:
        """The random number of each draft's test. `place`: see `draw_draft`."""
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
        """The drafts that stand and the token after them.

        Where a draft fell that token has the distribution `max(scale * p - q, 0)`, else `p`.
        """
        last_draft = jnp.minimum(num_accepted, self.tokens.shape[1] - 1)
        target_logits = at_index(self.target, num_accepted)
        p = jax.nn.softmax(target_logits, axis=1)
        q = jax.nn.softmax(at_index(self.draft, last_draft), axis=1)
        excess = excess_of(p, q, scale[:, None])
        draft_fell = (num_accepted < num_drafts) & ~self.inputs.is_greedy
        # No excess (p equals q, up to rounding): then p is all that is left to draw from.
        from_excess = draft_fell & (excess.sum(axis=1) > 0.0)
        scores = jnp.where(from_excess[:, None], jnp.log(excess), target_logits)
        # From p itself the token is plain sampling's own, noise included.
        use = jnp.where(from_excess, int(Use.RESIDUAL), int(Use.TARGET))
        scores = add_noise(scores, self.inputs, at_index(self.positions, num_accepted), use)
        token = argmax_or_none(scores, at_index(self.is_sound, num_accepted))
        return emit(self.tokens, token, num_accepted)


def _probability(
    logits: Float[Array, "rows places vocab"], tokens: Int[Array, "rows places"]
) -> Float[Array, "rows places"]:
    """`softmax(logits)` at `tokens`; ids outside the vocabulary read some other id's."""
    ids = jnp.clip(tokens, 0, logits.shape[2] - 1)[:, :, None]
    chosen = jnp.take_along_axis(logits, ids, axis=2)[:, :, 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=2))


def _is_distribution(logits: Float[Array, "rows places vocab"]) -> Bool[Array, "rows places"]:
    """Whether `softmax(logits)` has no NaN."""
    return jnp.isfinite(jax.nn.logsumexp(logits, axis=2))
