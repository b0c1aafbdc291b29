"""Drafts that the host thought of, as far as they still follow what has been emitted since."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools, TokenHistory
from jaxspec.models.base import Model
from jaxspec.proposers.base import DraftInputs, Drafts, HostPaths, Proposer
from jaxspec.speculation import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class SuffixProposer(Proposer):
    """Aligns the paths that the host's suffix index found (`jaxspec.scheduler.suffix_drafter`).

    The host knows tokens some dispatches late. Where those that came since are the path's first
    ones, the next are the drafts; else there are none.
    """

    num_drafts: int
    factor: float  # drafts for each token of the match, the path's own that came since counted in

    @classmethod
    def from_config(cls, config: SpeculativeConfig, model: Model) -> "SuffixProposer":
        """A proposer of `config.num_drafts` drafts at most."""
        return cls(config.num_drafts, config.options.suffix_decoding_max_spec_factor)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """The tokens of every request."""
        return (TokenHistory(),)

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
    ) -> tuple[Drafts, Pools]:
        """See `Proposer.propose`."""
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
    """What follows each row's newest token in its path, and whether all before it came so.

    `newest` is that token's index in its request, and `came` has what stands at the path's places,
    junk behind the newest. The drafts end with -1s.
    """
    length = paths.tokens.shape[1]
    place = jnp.arange(length)[None, :]
    since = newest + 1 - paths.first  # tokens that came
    follows = jnp.all((paths.tokens == came) | (place >= since[:, None]), axis=1)
    ahead = since[:, None] + jnp.arange(num_drafts)[None, :]
    drafts = jnp.take_along_axis(paths.tokens, jnp.clip(ahead, 0, length - 1), axis=1)
    return jnp.where(ahead < length, drafts, -1), follows & (since >= 0)
