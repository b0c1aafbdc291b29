"""Drafts from paths that the host predicted, if they match the tokens emitted since."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools, TokenHistory
from jaxspec.models.base import Model
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers.base import DraftInputs, Drafts, HostPaths, Proposer


@dataclasses.dataclass(frozen=True)
class SuffixProposer(Proposer):
    """Draft from paths that the host's suffix index found (`jaxspec.scheduler.suffix_index`).

    The host receives tokens some dispatches late. If the tokens emitted since are the first ones of
    the path, the next ones are the drafts; otherwise there are none.
    """

    num_drafts: int
    factor: float  # drafts per matched token, including tokens of the path emitted since

    @classmethod
    def from_config(cls, config: SpeculativeConfig, model: Model) -> "SuffixProposer":
        return cls(config.num_drafts, config.options.suffix_decoding_max_spec_factor)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        return (TokenHistory(),)

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
    ) -> tuple[Drafts, Pools]:
        slots, newest, paths = inputs.slots, inputs.num_computed, inputs.paths
        history = inputs.write_history(pools[TokenHistory.name])
        pools = pools | {TokenHistory.name: history}
        if not inputs.num_drafts or paths is None:
            return Drafts.none(slots.shape[0]), pools
        places = paths.first[:, None] + jnp.arange(paths.tokens.shape[1])[None, :]
        came = TokenHistory.read_at(history, inputs.model.page_tables, slots, places)
        drafts, follows = align(paths, newest, came, inputs.num_drafts)
        since = newest + 1 - paths.first
        matched = (paths.match + since).astype(jnp.float32)
        most = jnp.floor(self.factor * matched).astype(jnp.int32)
        num_drafts = jnp.minimum(jnp.sum(drafts >= 0, axis=1, dtype=jnp.int32), most)
        return Drafts(drafts, jnp.where(inputs.should_draft & follows, num_drafts, 0), None), pools


def align(
    paths: HostPaths, newest: Int[Array, " rows"], came: Int[Array, "rows path"], num_drafts: int
) -> tuple[Int[Array, "rows drafts"], Array]:
    """Return the path's tokens after each row's newest one, and the rows that followed the path.

    `newest` is that token's index in its request. `came` holds the request's tokens at the
    positions of the path; those after `newest` are undefined. The drafts are padded with -1.
    """
    length = paths.tokens.shape[1]
    place = jnp.arange(length)[None, :]
    since = newest + 1 - paths.first  # tokens emitted since the path was made
    follows = jnp.all((paths.tokens == came) | (place >= since[:, None]), axis=1)
    ahead = since[:, None] + jnp.arange(num_drafts)[None, :]
    drafts = jnp.take_along_axis(paths.tokens, jnp.clip(ahead, 0, length - 1), axis=1)
    return jnp.where(ahead < length, drafts, -1), follows & (since >= 0)
