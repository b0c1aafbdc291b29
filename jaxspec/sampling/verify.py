"""Acceptance of drafts, and the exact and synthetic rules for it."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling.noise import Use, uniform_noise
from jaxspec.sampling.params import NO_TOKEN


@flax.struct.dataclass
class Acceptance:
    """Result of the verification of each row. The axis `emits` has length `drafts + 1`."""

    tokens: Int[Array, "rows emits"]  # int32; accepted drafts, the token after them, then -1
    num_accepted: Int[Array, " rows"]  # int32; accepted drafts, 0..drafts

    @property
    def num_emitted(self) -> Int[Array, " rows"]:
        """Number of emitted tokens (int32): `num_accepted`, plus 1 unless the target has none."""
        return jnp.sum(self.tokens != NO_TOKEN, axis=1, dtype=jnp.int32)


def verify_exact(
    target_tokens: Int[Array, "rows emits"], draft_tokens: Int[Array, "rows drafts"]
) -> Acceptance:
    """Accept a draft iff the target draws the same token and all drafts before it are accepted.

    `target_tokens` (int32) is the target's token at each position, with the drafts as context;
    `draft_tokens` (int32) may hold placeholders (-1), which are always rejected. The output is that
    of plain sampling, token for token. For a draft that was not drawn at random, this is the
    rejection sampling of Leviathan et al. 2023 with a one-hot `q`: the draft `x` is accepted with
    probability `p(x)`, else the token has the distribution `p` without `x`.

    Where the target has no token (-1, a NaN row), nothing is emitted from there on.
    """
    is_equal = draft_tokens == target_tokens[:, : draft_tokens.shape[1]]
    num_accepted = count_leading(is_equal & (draft_tokens != NO_TOKEN))
    return emit(draft_tokens, at_index(target_tokens, num_accepted), num_accepted)


def verify_synthetic(
    target_tokens: Int[Array, "rows emits"],
    draft_tokens: Int[Array, "rows drafts"],
    rates: Float[Array, " drafts"],
    seeds: Int[Array, " rows"],
    positions: Int[Array, "rows emits"],
) -> Acceptance:
    """Accept drafts at given rates, regardless of the target. LOSSY: for speed benchmarks.

    `rates[j]` (float32) is the probability that draft `j` and all before it are accepted. Accepted
    drafts are emitted, then the target's token. Placeholders (-1) are rejected.
    """
    rows, drafts = draft_tokens.shape
    before = jnp.pad(rates, (1, 0), constant_values=1.0)[:drafts]
    conditional = jnp.where(before > 0.0, rates / jnp.where(before > 0.0, before, 1.0), 0.0)
    u = uniform_noise(
        jnp.repeat(seeds, drafts), positions[:, :drafts].reshape(-1), Use.ACCEPT
    ).reshape(rows, drafts)
    num_accepted = count_leading((u < conditional[None, :]) & (draft_tokens >= 0))
    return emit(draft_tokens, at_index(target_tokens, num_accepted), num_accepted)


def count_leading(stands: Bool[Array, "rows drafts"]) -> Int[Array, " rows"]:
    """Return the number (int32) of leading true entries in each row."""
    return jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def at_index(values: Array, index: Int[Array, " rows"]) -> Array:
    """Return `values[r, index[r]]` for each row `r`."""
    column = index.reshape(index.shape[0], *(1 for _ in values.shape[1:]))
    return jnp.take_along_axis(values, column, axis=1)[:, 0]


def emit(
    draft_tokens: Int[Array, "rows drafts"],
    token: Int[Array, " rows"],
    num_accepted: Int[Array, " rows"],
) -> Acceptance:
    """Return the accepted drafts, then `token`, then -1."""
    # The padding is never emitted: only `token` can be at its index.
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    offset = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :]
    end = num_accepted[:, None]
    rest = jnp.where(offset == end, token[:, None], NO_TOKEN)
    return Acceptance(tokens=jnp.where(offset < end, drafts, rest), num_accepted=num_accepted)
