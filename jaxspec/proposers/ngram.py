"""Drafts by prompt lookup: what followed the same last tokens earlier in the request."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools, TokenHistory
from jaxspec.models.base import Model
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer


@dataclasses.dataclass(frozen=True)
class NgramProposer(Proposer):
    """Prompt lookup (Saxena, 2023) on the device, over the tokens of prompt and output.

    The longest match of the newest `shortest` to `longest` tokens is used, and the last one among
    equally long matches. If its continuation reaches the newest token before K drafts are complete,
    it is repeated:

        tokens        x a b c y a b c      the newest are "a b c"
        match           a b c
        drafts of 6                        y a b c y a
    """

    num_drafts: int
    shortest: int
    longest: int

    @classmethod
    def from_config(cls, config: SpeculativeConfig, model: Model) -> "NgramProposer":
        bounds = config.options.prompt_lookup_min, config.options.prompt_lookup_max
        return cls(config.num_drafts, *bounds)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        return (TokenHistory(),)

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
    ) -> tuple[Drafts, Pools]:
        page_tables, slots = inputs.model.page_tables, inputs.slots
        history = inputs.write_history(pools[TokenHistory.name])
        pools = pools | {TokenHistory.name: history}
        if not inputs.num_drafts:
            return Drafts.none(slots.shape[0]), pools
        drafts, found = look_up(
            TokenHistory.read(history, page_tables, jnp.where(inputs.should_draft, slots, 0)),
            inputs.num_computed + 1,
            self.shortest,
            self.longest,
            inputs.num_drafts,
        )
        num_drafts = jnp.where(inputs.should_draft & found, inputs.num_drafts, 0)
        return Drafts(drafts, num_drafts, None), pools


def look_up(
    tokens: Int[Array, "rows positions"],
    lengths: Int[Array, " rows"],
    shortest: int,
    longest: int,
    num_drafts: int,
) -> tuple[Int[Array, "rows drafts"], Array]:
    """Return what followed the last of the longest matches, and the rows that have a match.

    Only the first `lengths` tokens of each row are read. Both results are arrays: int32 ids
    `[rows, num_drafts]` and bool `[rows]`.
    """
    size = tokens.shape[1]
    index = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    matches, matched = index < lengths[:, None] - 1, jnp.zeros_like(tokens)
    for back in range(longest):
        place = lengths - 1 - back
        wanted = jnp.take_along_axis(tokens, jnp.maximum(place, 0)[:, None], axis=1)
        earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :size]
        matches &= (earlier == wanted) & (index >= back) & (place >= 0)[:, None]
        matched += matches.astype(jnp.int32)
    # Longest match first, then the last one, as one number for a single reduction.
    score = jnp.where(matched >= shortest, matched * size + index, -1)
    best = jnp.max(score, axis=1)
    start = best % size + 1
    period = jnp.maximum(lengths - start, 1)
    place = start[:, None] + jnp.arange(num_drafts)[None, :] % period[:, None]
    drafts = jnp.take_along_axis(tokens, jnp.clip(place, 0, size - 1), axis=1)
    return drafts, best >= 0
