"""Verification: which drafts stand, and the one token that follows them."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling.noise import Use, uniform_noise
from jaxspec.sampling.params import NO_TOKEN


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
    num_accepted = count_leading(is_equal & (draft_tokens != NO_TOKEN))
    return emit(draft_tokens, at_index(target_tokens, num_accepted), num_accepted)


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
    num_accepted = count_leading((u < conditional[None, :]) & (draft_tokens >= 0))
    return emit(draft_tokens, at_index(target_tokens, num_accepted), num_accepted)


def count_leading(stands: Bool[Array, "rows drafts"]) -> Int[Array, " rows"]:
    """How many of a row's first entries (int32) are all true."""
    return jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def at_index(values: Array, index: Int[Array, " rows"]) -> Array:
    """`values[r, index[r]]` of each row `r`."""
    column = index.reshape(index.shape[0], *(1 for _ in values.shape[1:]))
    return jnp.take_along_axis(values, column, axis=1)[:, 0]


def emit(
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
